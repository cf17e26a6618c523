"""What `validate` brings to the gate: who is judged, by which servers, and the figures taken in process."""
