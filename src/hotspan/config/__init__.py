"""What users ask for, parsed once into frozen dataclasses."""
