"""Double: the network that is being made."""

stack = []


def default_net():
    assert stack, "no network is being made"
    return stack[-1]


def default_trtnet():
    return default_net().trt_network
