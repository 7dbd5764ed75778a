"""The process that serves MindSpore's cluster; the user's script does not run in it."""

from mindspore import communication

if __name__ == "__main__":
    communication.init()
