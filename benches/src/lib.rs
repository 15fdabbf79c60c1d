//! The benchmarks.
