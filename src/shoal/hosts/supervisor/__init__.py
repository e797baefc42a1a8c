"""`shoal up`: the process that starts, watches, feeds and replaces all others of a pool.

Here: children with backoff, the fleet's ledger that a new worker is filled from, worker slots, embedded engines, the
merged admin server, reload and drain.  Not here: routing (every decision is a worker's), Envoy's configuration
(`hosts.envoy`), what is known of engines (`hosts.fleet`).
"""
