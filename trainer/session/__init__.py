"""What a `Checkpointer` is made of: one start of one training.

place, runname, claims, surroundings   which run, attempt and rank this is, and that nobody else is it
settings, schedule, wishes, advice     when to save, as the script, the service or a signal wants it
agreement, watching                    what the ranks tell each other in a step, and what follows from the loss
saves, outcomes, restoring, lastword   saving, what became of it, resuming, and the last thing said
"""
