"""The work in shards: tasks, the processes that take them, and what is done already."""
