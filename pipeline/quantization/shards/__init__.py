"""The work in shards: tasks, the processes that do them, and the record of progress."""
