//! The base of the guest tests: a runner, the way into the lab, and guests with a console.
#![forbid(unsafe_code)]

pub mod attack;
pub mod browser;
pub mod compare;
pub mod console;
pub mod desk;
pub mod doctor;
pub mod engine;
pub mod enlightened;
pub mod enlightened_linux;
pub mod evdev;
pub mod evidence;
pub mod flash;
pub mod fwts;
pub mod guest;
pub mod idle;
pub mod image;
pub mod lab;
pub mod linux;
pub mod network;
pub mod novnc;
pub mod patience;
pub mod place;
pub mod print;
pub mod program;
pub mod python;
pub mod rebalance;
pub mod recorded;
pub mod rehearsal;
pub mod sight;
pub mod standstill;
pub mod suite;
pub mod tally;
pub mod tpm;
pub mod uefi;
pub mod viewer;
