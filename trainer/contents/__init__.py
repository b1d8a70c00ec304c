"""What of a training is saved, kind by kind: found, told apart from what it was, and put back (trainer.state).

leaves      model and optimizer as named tensors; moduletree and aliases notice what has changed since the last save
opaque      everything that is not a tensor, as bytes that hold no code
randomness  the random states of a rank
replicas    whether ranks that should hold the same do
"""
