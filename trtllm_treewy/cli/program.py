"""What the command is called, and the exit codes it ends with."""

PROGRAM = "trtllm-treewy"
EXIT_OK = 0
EXIT_REQUEST_FAILED = 1  # a request ended with an error of its own; the others are whole
EXIT_CHECK_FAILED = 1  # of doctor: what was asked about is not as it should be
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE
