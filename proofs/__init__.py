"""What the cache promises, each promise as a program that tries to break it and that anyone can run again.

    kill, power      a crash of the process, or of the machine      fault, simulate   disks that fail, in any order
    flip             bytes that changed                             model, fuzz       any calls, any input
    soak             an hour of churn                               bad_places       slots that fail for good

Each module has frozen options and `run(options, progress) -> Proof`; all follows from the seed, but for what threads
and the disk decide in `kill` and `soak`.
"""
