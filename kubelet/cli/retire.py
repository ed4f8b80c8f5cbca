"""Retirement of a node: what ``kubelet retire`` does.

The broker forgets the node, the relay revokes its leaf, and only then the identity is removed here: after a
failure the node has all that it needs to try again. Must not be imported by the running daemon.
"""

import asyncio
import os
from pathlib import Path
from typing import TextIO

from kubelet.announce.mqtt import MqttPublisher, Publisher, publish_all
from kubelet.config import NodeConfig, caller_ids_file, forget, last_issued_file, relay_kinds_file
from kubelet.daemon.composition import node_environment
from kubelet.daemon.node import NodeEnvironment
from kubelet.process import hold_alone
from kubelet.session.channel import NOT_REACHED, Channel, close_code, open_channel
from kubelet.session.link import AudienceError, answer_to
from kubelet.session.relay_addresses import RelayAddress
from schemas import topics
from schemas.error_roots import PeerError
from schemas.faults import connection_reason
from schemas.frames import Frame
from schemas.identity_files import IdentityFiles, NodeIdentity
from schemas.payloads import RetireAck
from schemas.process.logs import make_logger
from schemas.session import ByeReason, CloseCode, PeerProtocolError
from schemas.ulids import UlidSource

_TIMEOUT_S = 15.0


class RetiredBeforeError(PeerError):
    """The relay has revoked the leaf already: the answer to an earlier try was lost."""


class RetirementError(PeerError):
    """The node is not retired; the text is why, and what to do."""


async def retire(config: NodeConfig, state_dir: Path, stream: TextIO) -> bool:
    """Take the node in ``state_dir`` out of service; return whether the broker has forgotten it.

    A broker that is not reached, or does not confirm, is no failure: the relay accepts no manifest of a node
    whose leaf is revoked.

    Raises:
        IdentityFilesError: the identity cannot be used, or a daemon runs with it.
        RetirementError: the relay was not reached, or did not agree. Nothing is removed here.
    """
    files = IdentityFiles(state_dir)
    identity = files.read()
    with hold_alone(state_dir):
        environment = node_environment(
            config, f"edge-retire-{identity.node_id}", make_logger("kubelet", stream), files
        )
        forgotten = await _remove_from_broker(environment.publisher, identity.node_id)
        await _revoke_at_any(environment, identity)
        files.remove()
        forget(state_dir)
        for kept in (last_issued_file, caller_ids_file, relay_kinds_file):
            kept(state_dir).unlink(missing_ok=True)
    return forgotten


async def _remove_from_broker(publisher: Publisher, node_id: str) -> bool:
    """Publish empty retained messages, by which the broker forgets the node's; without one it holds none."""
    if not isinstance(publisher, MqttPublisher):
        return True
    # The announce first: a manifest without its leaf would only wait for it.
    messages = [(topics.announce(node_id), b""), (topics.identity(node_id), b"")]
    return await publish_all(publisher, messages, _TIMEOUT_S)


async def _revoke_at_any(environment: NodeEnvironment, identity: NodeIdentity) -> None:
    """Have the leaf revoked by the first relay of the fleet that can be reached."""
    failure = RetirementError("there is no relay")
    for url in environment.config.relays:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await _revoke_leaf(environment, identity, RelayAddress(url))
        except RetiredBeforeError:
            return
        except TimeoutError:
            failure = RetirementError(f"{url} does not answer; try again")
        except AudienceError:
            failure = RetirementError(f"{url} has another name than the one pinned")
        except (*NOT_REACHED, PeerProtocolError) as error:
            failure = RetirementError(f"{url} was not reached: {connection_reason(error)}; try again")
        else:
            return
    raise failure


async def _revoke_leaf(environment: NodeEnvironment, identity: NodeIdentity, address: RelayAddress) -> None:
    ulids = UlidSource(environment.now_ms, os.urandom)
    relay_url, tls = environment.config.relay_url, environment.relay_tls()
    async with open_channel(relay_url, address, tls, environment.reader, ulids, _TIMEOUT_S) as channel:
        challenge = await _receive(channel, "challenge")
        auth = answer_to(challenge.payload, identity, relay_url, ulids.new(), boot_id=ulids.new())
        await channel.send("auth", auth, challenge.msg_id)
        await _receive(channel, "welcome")
        await channel.send("retire", {})
        answer: RetireAck = (await _receive(channel, "retire_ack")).payload
        if not answer["ok"]:
            code = answer["error"]["code"]
            raise RetirementError(f"the relay does not revoke the leaf ({code}): ask its operator")


async def _receive(channel: Channel, type_: str) -> Frame:
    """Return the next frame of ``type_``; what else the relay sends to a node in its session is passed over.

    Raises:
        RetiredBeforeError, PeerProtocolError, NOT_REACHED: there is none.
    """
    try:
        while (frame := await channel.receive()) is None or frame.type != type_:
            if frame is not None and frame.type == "bye":
                if frame.payload["reason"] == ByeReason.REVOKED:
                    raise RetiredBeforeError
                raise PeerProtocolError("the relay ended the session")
    except NOT_REACHED as error:
        if close_code(error) == CloseCode.REVOKED:
            raise RetiredBeforeError from None
        raise
    return frame
