from kit.engine import prepare_environment

prepare_environment()
