"""KV handoff from prefill to decode ranks: blocks travel while the prompt is still being computed.

    frames         what crosses the wire, as bytes
    protocol       pieces of a request, and the rule of who may touch blocks
    send_side      decisions of the prefill side    (no I/O, no clock)
    receive_side   decisions of the decode side     (no I/O, no clock)
    ring           shared memory between two processes of one host
    stream         blocking sockets and addresses
    handshake      mutual proof of membership, agreement on layout and ring
    peer           one receiving rank as its sender sees it
    sender, receiver   threads around the two sides

Workers use `sender.HandoffSender` and `receiver.HandoffReceiver`.
"""
