"""The gate: measures two servers in turn until every M is decided, and judges."""
