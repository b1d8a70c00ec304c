"""How one checkpoint gets from the memory of the ranks to durable, verified files.

image      what a rank's file looks like, byte for byte, before anything is copied (pure, no torch)
planning   from a state dict to the image of each rank and the checkpoint's `.metadata` (torch): `structure` says what a
           rank holds, `sharing` who writes what several hold, `zipimage` and `pickles` lay it out, `indexing` lists it
staging    the memory that an image is staged in, and how the bytes get there: copied, or protected and copied behind
writer     the process beside each rank that writes, checksums, publishes and reads back (no torch)
saver      the rank's side of it: begin a save, hear how it ended
reading    a verified restore, into any number of ranks: `located` and `copies` say which copy of a file is read and who
           checks it, `targets` and `regions` which of its bytes go where, `filereads` reads them in one pass
"""
