"""This module opens the channel on which a group exchanges gradients; synchronizers call it."""

from __future__ import annotations

from mindnlp_dp.communication.process_group import ProcessGroup
from mindnlp_dp.communication.transports.channel import Channel


def open_gradient_channel(group: ProcessGroup) -> Channel:
    """Return the group's channel, or a new one if any rank left an exchange on the old one half way. A collective.

    Every gradient update calls this once, when it is created. Earlier updates can then no longer use the old channel.
    """
    transport = group._transport
    if any(group.all_gather_object(bool(transport.channel.abandoned))):
        transport.reopen_channel()
    return transport.channel
