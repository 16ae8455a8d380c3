# ----------------------------------------------------------------------------------------------------------
# Your engine. `inputs` holds the tensors of the step by name, as numpy arrays (bf16 and fp8 as float32,
# exactly), and for attention `inputs["writes"]`: the tensors of the KV writes before it, in order.
# CONFIGURATION has the sizes. Return the outputs by name, all ranks on the first axis, as WANTED lists them.


def engine(inputs: dict) -> dict:
    """What your code gives for the inputs."""
    raise NotImplementedError("put your call here")
