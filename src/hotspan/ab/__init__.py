"""`hotspan ab`: whether one server answers as another one does, with intervals and a verdict."""
