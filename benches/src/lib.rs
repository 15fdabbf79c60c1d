//! What the benchmarks share: the machines that are compared, started alike, and the table.

pub mod machine;
pub mod rival;
pub mod table;
pub mod tap;
