"""KV handoff from prefill to decode ranks: blocks travel while the prompt is still being computed.

    frames         what crosses the wire, as bytes
    protocol       pieces of a request, and the rule of who may touch blocks
    send_side      decisions of the prefill side    (no I/O, no clock)
    receive_side   decisions of the decode side     (no I/O, no clock)
    ring           shared memory between two processes of one host
    stream         blocking sockets, addresses, mutual proof of membership
    sender, receiver   threads around the two sides

Workers use `sender.HandoffSender` and `receiver.HandoffReceiver`.
"""
