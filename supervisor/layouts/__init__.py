"""Checkpoints of trainings that know nothing of the supervisor: one module per layout, each with the same two verbs.

`find` says which names of a folder may be checkpoints; `inspect` says whether one is whole and which step it is.
`survey` looks at a folder with them, `readback` reads one checkpoint back. All of it runs in child processes, as the
owner of the files: nothing is unpickled, no link is followed, everything read is bounded.
"""
