"""Is every access to memory ordered by events, whatever the speed of each stream?"""
