//! Shared parts of the benchmarks: the compared programs, their machines and interfaces, pictures
//! for the screen, a viewer, and the result table.

pub mod http;
pub mod machine;
pub mod moved;
pub mod pictures;
pub mod qmp;
pub mod rival;
pub mod saved;
pub mod stage;
pub mod table;
pub mod tap;
pub mod viewer;
