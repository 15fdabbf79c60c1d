//! The entry point of the container image: reads the environment, and runs the machine that it
//! describes.
#![forbid(unsafe_code)]

pub mod agent;
pub mod answer;
pub mod ask;
pub mod command;
pub mod copy;
pub mod descriptors;
pub mod desktop;
pub mod disks;
pub mod download;
pub mod esd;
pub mod files;
pub mod firmware;
pub mod help;
pub mod jail;
pub mod kept;
pub mod log;
pub mod media;
pub mod medium;
pub mod migration;
pub mod net;
pub mod plan;
pub mod pod;
pub mod qmp;
pub mod settings;
pub mod setup_disk;
pub mod shared_folder;
pub mod snapshots;
pub mod source;
pub mod state;
pub mod status;
pub mod story;
pub mod suspended;
pub mod web;
