from tests.engine.rig import prepare_environment

prepare_environment()
