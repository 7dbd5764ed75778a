"""The line that a group's gradients travel on, for those who exchange them."""

from __future__ import annotations

from .collectives import ProcessGroup
from .transports.channel import Channel


def open_gradient_channel(group: ProcessGroup) -> Channel:
    """The group's channel; a new one where any rank has left an exchange on the last one half way. A collective.

    Every window of gradients asks for it once, when it is made. Those of before have no use for the old one any more.
    """
    transport = group._transport
    if any(group.all_gather_object(bool(transport.channel.abandoned))):
        transport.reopen_channel()
    return transport.channel
