PRAGMA application_id = 1397510998;
PRAGMA user_version = 1;
BEGIN TRANSACTION;
CREATE TABLE attempts (
  run TEXT NOT NULL REFERENCES runs (name),
  number INTEGER NOT NULL,
  token TEXT NOT NULL,
  state TEXT NOT NULL,
  nodes_wanted INTEGER NOT NULL,
  spares INTEGER NOT NULL,
  exclude TEXT NOT NULL,
  resume_step INTEGER NOT NULL,
  resume_path TEXT NOT NULL,
  job_id INTEGER,
  nodes TEXT NOT NULL,
  planned_at TEXT NOT NULL,
  submitted_at TEXT,
  started_at TEXT,
  stepped_at TEXT,
  over_at TEXT,
  "end" TEXT,
  end_detail TEXT NOT NULL,
  exit_code INTEGER,
  is_job_gone INTEGER NOT NULL,
  first_step INTEGER,
  last_step INTEGER,
  phase TEXT NOT NULL,
  progress_at TEXT,
  slurm_restarts INTEGER NOT NULL,
  log_offset INTEGER NOT NULL,
  slurm_submit_at TEXT,
  slurm_user TEXT NOT NULL,
  checkpoint_every_s REAL NOT NULL,
  advice_seq INTEGER NOT NULL,
  save_requests INTEGER NOT NULL,
  save_asked_at TEXT,
  save_costs_s TEXT NOT NULL,
  save_total_s REAL,
  saved_step INTEGER,
  save_failures INTEGER NOT NULL,
  save_error TEXT NOT NULL,
  uploaded TEXT NOT NULL,
  upload_failures INTEGER NOT NULL,
  upload_error TEXT NOT NULL,
  unshared_nodes TEXT NOT NULL,
  skip_samples TEXT NOT NULL,
  loss_fault TEXT,
  launch INTEGER NOT NULL,
  launched_at TEXT,
  launch_step INTEGER,
  training TEXT NOT NULL,
  recovering TEXT NOT NULL,
  recovering_at TEXT,
  interruptions_read INTEGER NOT NULL,
  stragglers TEXT NOT NULL,
  advised_path TEXT NOT NULL,
  advised_step INTEGER NOT NULL,
  drill TEXT,
  planned INTEGER NOT NULL,
  PRIMARY KEY (run, number)
);
INSERT INTO "attempts" VALUES('gpt',1,'gpt-1','over',3,0,'[]',0,'',NULL,'[]','2026-11-30T03:00:00.000000+00:00',NULL,NULL,NULL,NULL,NULL,'',NULL,0,NULL,NULL,'',NULL,0,0,NULL,'',0.0,0,0,NULL,'[]',NULL,NULL,0,'','',0,'','[]','[]',NULL,0,NULL,NULL,'[]','',NULL,0,'[]','',0,NULL,0);
INSERT INTO "attempts" VALUES('gpt',2,'gpt-2','running',3,0,'[]',0,'',NULL,'[]','2026-11-30T03:00:00.000000+00:00',NULL,NULL,NULL,NULL,NULL,'',NULL,0,NULL,NULL,'',NULL,0,0,NULL,'',0.0,0,0,NULL,'[]',NULL,NULL,0,'','',0,'','[]','[]',NULL,0,NULL,NULL,'[]','',NULL,0,'[]','',0,NULL,0);
CREATE TABLE checkpoints (
  run TEXT NOT NULL REFERENCES runs (name),
  step INTEGER NOT NULL,
  attempt INTEGER NOT NULL,
  state TEXT NOT NULL,
  path TEXT NOT NULL,
  size_bytes INTEGER NOT NULL,
  files INTEGER NOT NULL,
  samples INTEGER NOT NULL,
  world_size INTEGER NOT NULL,
  is_elastic INTEGER NOT NULL,
  first_seen_at TEXT NOT NULL,
  verified_at TEXT,
  verified_by TEXT NOT NULL,
  load_failures INTEGER NOT NULL,
  detail TEXT NOT NULL,
  stamp TEXT NOT NULL,
  PRIMARY KEY (run, step, attempt)
);
INSERT INTO "checkpoints" VALUES('gpt',40,1,'verified','/shared/step-40.a1',0,0,0,0,1,'2026-11-30T03:00:00.000000+00:00',NULL,'',0,'','');
CREATE TABLE checks (
  id INTEGER PRIMARY KEY,
  node TEXT NOT NULL,
  at TEXT NOT NULL,
  result TEXT NOT NULL
);
INSERT INTO "checks" VALUES(1,'n2','2026-11-30T03:00:00.000000+00:00','{"check":"disk_free","ok":false,"detail":"","value":1.0,"limit":5.0}');
CREATE TABLE daemon (
  id INTEGER PRIMARY KEY CHECK (id = 1),
  pid INTEGER NOT NULL,
  host TEXT NOT NULL,
  version TEXT NOT NULL,
  started_at TEXT NOT NULL,
  cycle_at TEXT NOT NULL,
  cycle INTEGER NOT NULL,
  summary TEXT NOT NULL,
  ended_at TEXT
);
INSERT INTO "daemon" VALUES(1,4711,'head1','0.1.0','2026-11-30T03:00:00.000000+00:00','2026-11-30T03:00:00.000000+00:00',0,'starting',NULL);
CREATE TABLE intents (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  kind TEXT NOT NULL,
  key TEXT NOT NULL,
  reason TEXT NOT NULL,
  run TEXT NOT NULL,
  attempt INTEGER,
  job_id INTEGER,
  node TEXT NOT NULL,
  step INTEGER,
  text TEXT NOT NULL,
  state TEXT NOT NULL,
  created_at TEXT NOT NULL,
  tries INTEGER NOT NULL,
  tried_at TEXT,
  settled_at TEXT,
  outcome TEXT NOT NULL
);
INSERT INTO "intents" VALUES(1,'submit','submit:gpt:1','because','gpt',1,NULL,'',NULL,'','done','2026-11-30T03:00:00.000000+00:00',0,NULL,'2026-11-30T03:00:00.000000+00:00','job 7');
INSERT INTO "intents" VALUES(2,'submit','submit:gpt:2','because','gpt',1,NULL,'',NULL,'','open','2026-11-30T03:00:00.000000+00:00',0,NULL,NULL,'');
CREATE TABLE interruptions (
  run TEXT NOT NULL,
  attempt INTEGER NOT NULL,
  launch INTEGER NOT NULL,
  is_in_job INTEGER NOT NULL,
  kind TEXT NOT NULL,
  cause TEXT NOT NULL,
  node TEXT,
  nodes TEXT NOT NULL,
  is_planned INTEGER NOT NULL,
  detected_at TEXT NOT NULL,
  resumed_at TEXT,
  caught_up_at TEXT,
  last_step INTEGER,
  resume_step INTEGER,
  evidence TEXT NOT NULL,
  parts TEXT NOT NULL,
  drill TEXT NOT NULL,
  PRIMARY KEY (run, attempt, launch),
  FOREIGN KEY (run, attempt) REFERENCES attempts (run, number)
);
INSERT INTO "interruptions" VALUES('gpt',1,0,0,'node_silent','n2 is silent','n2','[]',0,'2026-11-30T03:00:00.000000+00:00',NULL,NULL,NULL,NULL,'[]','[]','');
CREATE TABLE migrations (
  version INTEGER PRIMARY KEY,
  name TEXT NOT NULL,
  applied_at TEXT NOT NULL
);
INSERT INTO "migrations" VALUES(1,'initial','2026-11-30T03:00:00.000000+00:00');
CREATE TABLE node_events (
  id INTEGER PRIMARY KEY,
  node TEXT NOT NULL,
  at TEXT NOT NULL,
  event TEXT NOT NULL,
  detail TEXT NOT NULL,
  run TEXT NOT NULL,
  attempt INTEGER
);
INSERT INTO "node_events" VALUES(1,'n2','2026-11-30T03:00:00.000000+00:00','node.drained','','',NULL);
CREATE TABLE nodes (
  node TEXT PRIMARY KEY NOT NULL,
  verdict TEXT NOT NULL,
  reason TEXT NOT NULL,
  since_at TEXT NOT NULL,
  failing TEXT NOT NULL,
  failed_sweeps INTEGER NOT NULL,
  checked_at TEXT,
  is_drained_by_us INTEGER NOT NULL,
  drain_reason TEXT NOT NULL,
  drained_at TEXT,
  boot_at TEXT NOT NULL
);
INSERT INTO "nodes" VALUES('n2','healthy','','1970-01-01T00:00:00.000000+00:00','[]',0,NULL,0,'',NULL,'');
CREATE TABLE pause (
  id INTEGER PRIMARY KEY CHECK (id = 1),
  is_paused INTEGER NOT NULL,
  changed_at TEXT NOT NULL,
  who TEXT NOT NULL
);
INSERT INTO "pause" VALUES(1,1,'2026-11-30T03:00:00.000000+00:00','uid 0');
CREATE TABLE requests (
  id INTEGER PRIMARY KEY,
  at TEXT NOT NULL,
  who_uid INTEGER NOT NULL,
  text TEXT NOT NULL
);
INSERT INTO "requests" VALUES(1,'2026-11-30T03:00:00.000000+00:00',0,'pause');
CREATE TABLE run_changes (
  id INTEGER PRIMARY KEY,
  run TEXT NOT NULL REFERENCES runs (name),
  at TEXT NOT NULL,
  state TEXT NOT NULL,
  why TEXT NOT NULL
);
INSERT INTO "run_changes" VALUES(1,'gpt','2026-11-30T03:00:00.000000+00:00','active','submitted');
CREATE TABLE runs (
  name TEXT PRIMARY KEY NOT NULL,
  spec TEXT NOT NULL,
  script TEXT,
  state TEXT NOT NULL,
  reason TEXT NOT NULL,
  is_paused INTEGER NOT NULL,
  owner_uid INTEGER NOT NULL,
  owner_gid INTEGER NOT NULL,
  inherited TEXT NOT NULL,
  created_at TEXT NOT NULL,
  changed_at TEXT NOT NULL,
  released_at TEXT,
  save_asked_at TEXT,
  drill TEXT,
  skips_released_at TEXT,
  final_step INTEGER
);
INSERT INTO "runs" VALUES('gpt','{"name":"gpt","command":["train.py"],"root":"/shared/runs","nodes":{"min":2,"max":3,"multiple_of":1,"spares":0,"procs_per_node":null,"elastic":null,"start_checks":true},"workdir":"/","environment":[],"slurm":{"partition":null,"account":null,"qos":null,"time_limit":null,"gpus_per_node":null,"warn_before_limit_s":120,"options":[]},"checkpoint":{"directory":null,"layout":"supervisor","every_s":600.0,"interval":"auto","every_min_s":60.0,"every_max_s":1800.0,"alert_after_s":0.0,"unfinished_markers":["-unfinished",".unfinished",".incomplete",".in_progress"],"keep_last":3,"local_dir":"","object_url":"","object_keep_last":3,"upload_mb_per_s":0.0,"resume_from_complete":false,"verify_on_head_max_bytes":21474836480},"progress":{"pattern":"","start_min_s":60.0,"start_max_s":3600.0,"restore_min_s":60.0,"restore_max_s":3600.0,"compile_min_s":60.0,"compile_max_s":3600.0,"step_min_s":7.0,"step_max_s":900.0,"save_min_s":60.0,"save_max_s":1800.0,"eval_min_s":60.0,"eval_max_s":3600.0,"end_min_s":300.0,"end_max_s":1800.0},"restart":{"max_without_progress":3,"max_node_failures":10,"backoff_s":15.0,"backoff_max_s":600.0,"in_job":true,"worker_start":"direct","stop_grace_s":2.0,"queue_ahead_s":0.0},"divergence":{"on_nan":"hold","on_spike":"hold","rollback_checkpoints":1,"max_rollbacks":2,"skip":true,"spike_score":0.0,"spike_window":128},"liveness":{"timeout_s":10.0,"beat_interval_s":1.0,"suspect_after_s":3.0,"confirm_s":1.5},"straggler":{"ratio":1.5,"window_steps":50,"action":"report"},"container":{"runtime":"none","image":"","mounts":[],"options":[]}}',NULL,'active','',0,0,0,'{"umask":null,"limits":[]}','2026-11-30T03:00:00.000000+00:00','2026-11-30T03:00:00.000000+00:00',NULL,NULL,NULL,NULL,NULL);
CREATE UNIQUE INDEX one_live_attempt ON attempts (run) WHERE state NOT IN ('over', 'ahead');
CREATE UNIQUE INDEX one_attempt_ahead ON attempts (run) WHERE state = 'ahead';
CREATE UNIQUE INDEX one_attempt_per_token ON attempts (token);
CREATE INDEX interruptions_by_time ON interruptions (detected_at);
CREATE INDEX node_events_by_node ON node_events (node, at);
CREATE INDEX node_events_by_time ON node_events (at);
CREATE INDEX checks_by_node ON checks (node, at);
CREATE INDEX checks_by_time ON checks (at);
CREATE UNIQUE INDEX one_open_intent_per_key ON intents (key) WHERE state = 'open';
CREATE INDEX intents_by_settling ON intents (settled_at);
CREATE INDEX requests_by_time ON requests (at);
CREATE INDEX run_changes_by_run ON run_changes (run, at);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('intents',2);
COMMIT;
