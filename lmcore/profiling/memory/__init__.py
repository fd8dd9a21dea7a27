"""Where the memory of a step goes: the history of its allocations, what they were for, and what a block saves."""
