"""The process that serves MindSpore's cluster; the user's script does not run in it."""


def run() -> None:
    """Serve until the cluster has come to its end, and end this process."""
    from mindspore import communication

    communication.init()


if __name__ == "__main__":
    run()
