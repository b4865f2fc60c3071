"""Organisations as peers: one node each, no centre, no barrier; members come and go and the run goes on.

Where to look, from what people do down to what travels:

- who is a member, and what was agreed: `identity`, `convener`, `federation` (its values: `values`), `plan`, `known`
- one member's part in a run, and what it shows: `join`, `member`, `status`, `live`
- rounds that nobody has to wait for, every part of a row counted once: `fabric`, `correspondence`, `links`, `rows`, `view`, `membership`
- what is on disk before anything leaves: `outbox`, `ledger`
- bytes between two members: `frames`, and how they get there: `post`, which is `channel` (gRPC and TLS: `dialling`, `listening`, `hello`,
  `queues`, `grpc_options`) or, for rehearsals, `simulated`
"""
