//! The VMM: KVM, the machine, and the interfaces that control it.
//!
//! `command` reads the command line, `machine` builds the machine, `vcpu` runs the processors,
//! `run` is the main loop from power-on to the exit status.

pub mod command;
pub mod config;
pub mod control;
pub mod cpuid;
pub mod doctor;
pub mod heap;
pub mod hyperv;
pub mod kvm;
pub mod machine;
pub mod migration;
pub mod msr;
pub mod needs;
pub mod parent;
pub mod plug;
pub mod ram;
pub mod reference;
pub mod run;
pub mod screenshot;
pub mod signals;
pub mod snapshot;
pub mod status;
pub mod vcpu;
pub mod viewers;
