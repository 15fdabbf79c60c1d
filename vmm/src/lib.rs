//! The VMM: KVM, the machine, and the way to talk to it.
//!
//! `main` reads the command line, `machine` is the recipe, `vcpu` the loop of a processor, `run`
//! the life of a machine from power-on to the exit status.

pub mod config;
pub mod cpuid;
pub mod keyvalue;
pub mod kvm;
pub mod msr;
pub mod ram;
pub mod size;
pub mod status;
pub mod vcpu;
