//! What the benchmarks share: the machines that are compared, started alike, what their screens
//! show and who looks at them, and the table.

pub mod machine;
pub mod pictures;
pub mod rival;
pub mod table;
pub mod tap;
pub mod viewer;
