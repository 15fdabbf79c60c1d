//! The host's side of a machine: disk images, networks, streams, sockets, and input from people at
//! a screen. Nothing here knows a register, KVM or the command line; both programs use it.
#![deny(unsafe_code)]

/// Lets serde read and write a type as text, by its `FromStr` and its `Display`.
#[macro_export]
macro_rules! as_text {
    ($type:ty) => {
        impl TryFrom<String> for $type {
            type Error = <Self as std::str::FromStr>::Err;

            fn try_from(text: String) -> Result<Self, Self::Error> {
                text.parse()
            }
        }

        impl From<$type> for String {
            fn from(value: $type) -> Self {
                value.to_string()
            }
        }
    };
}

pub mod channel;
pub mod clipboard;
pub mod disk;
pub mod display;
pub mod failure;
pub mod fnv;
pub mod gate;
pub mod hex;
pub mod input;
pub mod keyvalue;
pub mod listen;
pub mod lock;
pub mod mac;
pub mod memory;
pub mod net;
pub mod pci;
pub mod ram;
pub mod share_blocks;
pub mod size;
pub mod smram;
pub mod sound;
pub mod stream;
pub mod swtpm;
pub mod sync_folder;
pub mod testutil;
pub mod usb;
pub mod uuid;
