"""Where checkpoints stand, and what makes one trustworthy there: run directory, local disk, object storage. No torch.

stored      verdicts on files, manifests, what is found in a folder of checkpoints
leases      who reads or copies a checkpoint: nothing is removed under them
tiers       the node-local copies, and what is kept and what is pruned
sources     from which tier each file of a restore is read
recovery    a step that a crash left on the nodes' disks alone is finished
objects     object storage through fsspec; objectcli is its command
uploads     what is copied there next; mover is the process that does it, bandwidth its bound
"""
