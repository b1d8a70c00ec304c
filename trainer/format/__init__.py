"""What the bytes of a checkpoint say: read by the service and by the training alike, and nothing of it is ever run.

manifest    MANIFEST.json and its seal
pickled     a machine that reads pickles and calls nothing; series reads long runs of equal records
metadata    `.metadata`: which tensors there are and where each part lies; entries holds the parts in columns
coverage    whether what is described is all there, once
stale       asking again where a file system answers that a file is being replaced
"""
