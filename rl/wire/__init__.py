"""How weights get from the trainer to the engines: by value, by NCCL broadcast, or by CUDA IPC.

The trainer's rank 0 has a `Post`, every engine an `Inbox`; what the controller passes between them is a
`Parcel`, which holds the weights or says where they are to be had.
"""
