"""sbatch's words, held against the sbatch of this machine: what it makes of them, what it says, how it ends."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from slurm import sbatch_line as line
from slurm.client import CliClient
from slurm.sandbox import Sandbox
from slurm.sbatch_line import BadSubmission, Directives
from slurm.submitted import read_release, read_submitted
from slurm.types import SubmitRequest

pytestmark = pytest.mark.slurm

SCRIPT = "#!/bin/bash\n#SBATCH --comment='of the script' -N1-3 # both\n#SBATCH --time=7 --job-name=scripted\nexit 0\n"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox.start(nodes=2, mode="loopback") as started:
        yield started


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sh").write_text(SCRIPT)
    (tmp_path / "plain.sh").write_text("#!/bin/bash\nexit 0\n")
    return tmp_path


def run_sbatch(sandbox: Sandbox, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sbatch", *words],
        env={**os.environ, **sandbox.env, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# Held jobs: nothing of this needs a node.
SPELLINGS: tuple[tuple[tuple[str, ...], dict[str, str]], ...] = (
    (("train.sh",), {}),
    (("-N2", "--job=a", "train.sh", "-N1", "--hold"), {}),
    (("-Hk", "--time", "30", "--comment=x=y", "train.sh", "two words"), {}),
    (("--nodes", "1-2", "-J", "b", "--", "train.sh"), {}),
    (("train.sh",), {"SBATCH_TIMELIMIT": "9", "SBATCH_JOB_NAME": "of-env"}),
    (("-t8", "plain.sh"), {"SBATCH_TIMELIMIT": "9", "SBATCH_NO_REQUEUE": "yes"}),
    (("--requeue", "plain.sh"), {"SBATCH_NO_REQUEUE": "1"}),
    (("--no-requeue", "plain.sh"), {"SBATCH_REQUEUE": "no"}),
    (("--wrap=true", "-N", "1-2"), {}),
    (("-xn2", "--part=main", "plain.sh"), {}),
)


def draw_spellings(random: Random, count: int) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    """Options in any of their spellings, in any order, over what the script and the environment say."""
    for _ in range(count):
        chosen = random.sample(
            [
                spell(random, "N", "nodes", random.choice(["1", "2", "1-2"])),
                spell(random, "t", "time", str(random.randint(2, 50))),
                spell(random, "J", "job-n", random.choice(["a", "b c", "-d"])),
                spell(random, "", "comm", random.choice(["x=y", "-z", "two words"])),
                spell(random, "x", "exclud", "n2"),
                (random.choice(["-H", "--hold", "-Ok", "--no-requeue", "--requ", "-sO"]),),
            ],
            k=random.randint(0, 6),
        )
        words = [word for option in chosen for word in option]
        arguments = random.choice([(), ("-N1",), ("a", "--hold")])
        env = random.choice([{}, {"SBATCH_TIMELIMIT": "9"}, {"SBATCH_JOB_NAME": "of-env", "SBATCH_NO_REQUEUE": "1"}])
        yield (*words, random.choice(["train.sh", "plain.sh"]), *arguments), env


def spell(random: Random, letter: str, name: str, value: str) -> tuple[str, ...]:
    forms = [(f"--{name}={value}",), (f"--{name}", value)]
    if letter:
        forms += [(f"-{letter}{value}",), (f"-{letter}", value), (f"-O{letter}{value}",)]
    return random.choice(forms)


def test_options_mean_to_us_what_they_mean_to_sbatch(sandbox: Sandbox, here: Path) -> None:
    """Spelt in many ways, from the script, the environment and the command line."""
    client = CliClient(parent={**os.environ, **sandbox.env})
    release = read_release(client.fetch_cluster().version)
    assert release is not None
    for words, env in (*SPELLINGS, *draw_spellings(Random(22), 15)):
        command_line = line.parse_command_line(words)
        text = (here / command_line.script).read_text() if command_line.script else "#!/bin/sh\n"
        wanted = line.effective(command_line, line.read_variables(env), line.parse_directives(text))
        done = run_sbatch(sandbox, "--hold", "--parsable", *words, env=env)
        assert done.returncode == 0, (words, done.stderr)
        job = client.describe_job(int(done.stdout))
        assert job.name == wanted.job_name, words
        assert job.nodes == (wanted.nodes.least if wanted.nodes else 1), words
        assert job.comment == (wanted.value("comment") or ""), words
        assert job.time_limit == (f"00:{int(wanted.time_limit):02}:00" if wanted.time_limit else "UNLIMITED"), words
        assert job.exclude == (wanted.exclude or ""), words
        assert job.is_requeue == (wanted.is_requeue_wanted is not False), words
        submitted = read_submitted(job, release=release)
        if release <= (22, 5) or job.submit_line:  # else accounting alone would know
            assert submitted.arguments == tuple(" ".join(wanted.arguments).split()), words
        assert not submitted.is_certain or submitted.arguments == wanted.arguments, words
        assert submitted.options in (None, ("--hold", "--parsable", *command_line.options)), words
        log = line.render_log_path(wanted.output, job_id=job.job_id, job_name=job.name, user=job.user, node="n1")
        assert job.stdout == str(here / (log or "?")), words


LINES = (
    "--comment='a b' -J \"c d\"",
    '--comment=a\\"c',
    "--comment=a#b -J lost",
    "--comment=a\\#b # -J lost",
    "--comment='a#b'c\"d e\"",
    "--comment='a\\'b c'",
    '--comment "" -J lost\n#SBATCH -Jkept',
    "--comment\n#SBATCH next",
    "-J\\blank --comment=x\\\\y",
    "--comment=a -J hetjob",
    "--quiet --comm=a\\\ttab",
    "--comment=a\ttab -Jx",
    "--comment='é\xa0b'",
)


def test_lines_of_a_script_mean_to_us_what_they_mean_to_sbatch(sandbox: Sandbox, here: Path) -> None:
    """Quotes, backslashes, comments and values in the next line, which sbatch reads by rules of its own."""
    client = CliClient(parent={**os.environ, **sandbox.env})
    for number, body in enumerate(LINES):
        text = f"#!/bin/bash\n#SBATCH {body}\ntrue\n"
        (here / f"{number}.sh").write_text(text)
        done = run_sbatch(sandbox, "--hold", "--parsable", f"{number}.sh")
        directives = read_lines(text, f"{number}.sh")
        if isinstance(directives, BadSubmission):
            assert (done.stderr, done.returncode) == (directives.stderr, directives.exit_code), body
            continue
        wanted = line.effective(line.parse_command_line([f"{number}.sh"]), (), directives)
        assert done.returncode == 0, (body, done.stderr)
        job = client.describe_job(int(done.stdout))
        assert (job.name, job.comment) == (wanted.job_name.strip(), (wanted.value("comment") or "").strip()), body


def read_lines(text: str, name: str) -> Directives | BadSubmission:
    try:
        return line.parse_directives(text, name=name)
    except BadSubmission as error:
        return error


REFUSED: tuple[tuple[str, ...], ...] = (
    ("--nosuch", "plain.sh"),
    ("-Y", "plain.sh"),
    ("--nodes",),
    ("-N",),
    ("--hold=yes", "plain.sh"),
    ("-N3-2", "plain.sh"),
    ("-Nx", "plain.sh"),
    ("-vQ", "plain.sh"),
    ("--wrap=true", "plain.sh"),
    ("empty.sh",),
    ("blank.sh",),
    ("no-shebang.sh",),
    ("dos.sh",),
    ("nul.sh",),
    ("word.sh",),
    ("quote.sh",),
    ("colon.sh",),
    ("nosuch.sh",),
)


def test_what_sbatch_refuses_by_itself_is_refused_in_its_words_and_with_its_exit_code(
    sandbox: Sandbox, here: Path
) -> None:
    bodies = {
        "empty.sh": b"",
        "blank.sh": b" \n",
        "no-shebang.sh": b"true\n",
        "dos.sh": b"#!/bin/sh\r\ntrue\r\n",
        "nul.sh": b"#!/bin/sh\n\0",
        "word.sh": b"#!/bin/sh\n#SBATCH word\n",
        "quote.sh": b"#!/bin/sh\n#SBATCH -J 'a\n",
        "colon.sh": b"#!/bin/sh\n#SBATCH -N1 :\n",
    }
    for name, body in bodies.items():
        (here / name).write_bytes(body)
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda words: run_sbatch(sandbox, *words), REFUSED)
    for words, done in zip(REFUSED, answers, strict=True):
        assert (done.stderr, done.returncode, done.stdout) == (*say_no(here, words), ""), words


def say_no(here: Path, words: tuple[str, ...]) -> tuple[str, int]:
    """What we would print, and how we would end."""
    try:
        command_line = line.parse_command_line(words)
        if command_line.script and not (here / command_line.script).exists():
            return line.render_unreadable_script(command_line.script), 1
        text = line.check_text((here / command_line.script).read_bytes()) if command_line.script else ""
        line.effective(command_line, (), line.parse_directives(text, name=command_line.script or "stdin"))
    except BadSubmission as error:
        return error.stderr, error.exit_code
    return "", 0


@pytest.mark.parametrize("words", [(), ("--parsable",), ("--quiet",), ("-Q", "--parsable")])
def test_an_accepted_job_is_told_in_sbatchs_words(sandbox: Sandbox, here: Path, words: tuple[str, ...]) -> None:
    wanted = line.effective(line.parse_command_line((*words, "plain.sh")))
    done = run_sbatch(sandbox, "--hold", *words, "plain.sh")
    job_id = int("".join(filter(str.isdecimal, done.stdout)) or 0)
    said = line.render_submitted(job_id, is_parsable=wanted.is_parsable, is_quiet=wanted.is_quiet)
    assert (done.stdout, done.stderr, done.returncode) == (said, "", 0)


def test_a_refused_job_is_told_in_sbatchs_words(sandbox: Sandbox, here: Path) -> None:
    done = run_sbatch(sandbox, "-xn9", "plain.sh")
    assert (done.stderr, done.returncode) == (line.render_refused("Invalid node name specified"), 1)


def test_a_wrapped_command_is_the_script_that_sbatch_makes_of_it(sandbox: Sandbox, here: Path) -> None:
    client = CliClient(parent={**os.environ, **sandbox.env})
    done = run_sbatch(sandbox, "--hold", "--parsable", "--wrap=echo 'a  b'")
    assert client.fetch_script(int(done.stdout)) == line.wrap_text("echo 'a  b'")


# ---------------------------------------------------------------- jobs that run

PATTERNS = ("%4j-%12A", "%x.%u", "b%J.%s.%n.%t.%3t", "100%%-%j", "a\\%j", "%5x%j")


def test_a_log_is_where_its_pattern_says(sandbox: Sandbox, here: Path) -> None:
    (here / "logs").mkdir()
    paths = []
    for pattern in PATTERNS:
        done = run_sbatch(sandbox, "--parsable", "-Jnm", "-wn1", "-D", str(here / "logs"), "-o", pattern, "plain.sh")
        path = line.render_log_path(pattern, job_id=int(done.stdout), job_name="nm", user="root", node="n1")
        assert path is not None
        paths.append(path)
    for path in paths:
        wait_for(here / "logs" / path)


EXPORTS = (None, "ALL,X='a,b'", "X=1,all", "X=2,PATH", "PATH", "NONE", "NIL")


def test_a_persons_export_means_what_it_meant_and_our_variables_are_there(sandbox: Sandbox, here: Path) -> None:
    """SB-08: with one job as sbatch submits it, and one as it is submitted again."""
    script = here / "show.sh"
    script.write_text('#!/bin/bash\necho "$X|$SUPERVISOR_RUN" > "$1.part"; mv "$1.part" "$1"\n')
    client = CliClient(parent={**os.environ, **sandbox.env})
    mine = {"PATH": "/usr/bin:/bin", "X": "mine", "SBATCH_EXPORT": "NIL", "SLURM_EXPORT_ENV": "NIL"}
    for number, export in enumerate(EXPORTS):
        given = () if export is None else (f"--export={export}",)
        run_sbatch(sandbox, *given, "show.sh", f"plain.{number}", env={"PATH": sandbox.env["PATH"], "X": "mine"})
        value, environment = line.merge_export(export, {**mine, "SUPERVISOR_RUN": "run"}, ("SUPERVISOR_RUN",))
        request = SubmitRequest(
            script=script,
            token="t",
            job_name=f"again.{number}",
            nodes=None,
            output=None,
            arguments=(f"again.{number}",),
            export=value,
            environment=environment,
            is_own_environment=True,
            submit_dir=here,
        )
        client.submit(request)
    for number, export in enumerate(EXPORTS):
        before = wait_for(here / f"plain.{number}").split("|")[0]
        after, run = wait_for(here / f"again.{number}").strip().split("|")
        assert after == before, export
        assert run == ("" if export == "NIL" else "run"), export


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path.name}, but {sorted(p.name for p in path.parent.iterdir())}"
        time.sleep(0.05)  # between two looks at a condition with a deadline
    return path.read_text()
