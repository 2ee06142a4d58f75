"""Places where chunks live: a shared slab in RAM, a slab on disk. Each knows keys and bytes, none knows an engine."""
