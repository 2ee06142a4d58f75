"""The model families that hotspan is tried with; docs/compatibility.md has the table."""
