"""Many ranks: the groups they talk in, how the model is spread over them, and how their processes are started."""
