"""This module runs the scheduler process of MindSpore's cluster; the launcher starts it without the user's script."""


def main() -> None:
    """Serve until the cluster has ended, then end this process."""
    from mindspore import communication

    communication.init()


if __name__ == "__main__":
    main()
