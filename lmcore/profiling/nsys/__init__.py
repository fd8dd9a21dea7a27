"""Where the time of a step goes: ranges on the model, Nsight Systems or torch.profiler, and what they recorded."""
