//! Models of the USB drivers that are a part of Windows, on the real controller and devices.
//!
//! Their source is closed, so these models issue the register accesses, commands, TRBs and control
//! requests that are known of them. Each step names its source:
//!
//! - **usb3kd**: Microsoft's debugger extension, whose documented examples are dumps of the real
//!   drivers (learn.microsoft.com, `debuggercmds/-usb3kd-xhci-transferring`, `-xhci-eventring`,
//!   `-xhci-commandring`, `-xhci-trb`, `-xhci-findowner`).
//! - **UCX**: Microsoft's interface between host controller drivers and the hub driver
//!   (learn.microsoft.com, `ddi/ucxusbdevice`, `ddi/ucxendpoint`, `ddi/ucxcontroller`).
//! - **enumeration**: "How does USB stack enumerate a device?" of Microsoft's USB team (2009, about
//!   Windows 7; the order is the same since).
//! - **OS descriptors**: learn.microsoft.com, `usbcon/microsoft-defined-usb-descriptors`.
//! - **LPM**: learn.microsoft.com, `usbcon/common-hardware-problems-with-u1-or-u2-implementation`.
//! - **usbvfiod**: cyberus-technology/usbvfiod, pull request 238: a host controller model's log of
//!   Windows.
//! - **QEMU**: comments in `hw/usb/hcd-xhci.c` on what Windows does.
//! - Other traces are named where they are used.
//! - **spec**: the only order that a specification permits; a driver that works does it.
//! - **conjecture**: likely, but without a source.
#![forbid(unsafe_code)]

#[path = "inbox_usb/controller.rs"]
mod controller;
#[path = "inbox_usb/hid.rs"]
mod hid;
#[path = "inbox_usb/hub.rs"]
mod hub;
#[path = "inbox_usb/storage.rs"]
mod storage;
#[path = "inbox_usb/transfers.rs"]
mod transfers;
#[path = "inbox_usb/usbhub3.rs"]
mod usbhub3;
#[path = "inbox_usb/usbxhci.rs"]
mod usbxhci;

use devices::pci::Address;
use devices::registry::Config;
use devices::testutil::Bench;
use serde_json::{Value, json};

const AT: Address = Address::new(4, 0);
/// Guest memory: enough for the buffers that a test allocates.
const RAM: usize = 16 << 20;

/// A machine with a controller and these devices.
fn machine(devices: Vec<(&str, Value)>) -> Bench {
    let mut bench = Bench::new(RAM);
    plug(&mut bench, "xhci", json!({ "slot": "04.0" }));
    for (kind, fields) in devices {
        plug(&mut bench, kind, fields);
    }
    bench.board.shared.usb.check().unwrap();
    bench.board.run(Vec::new()).unwrap();
    bench
}

fn plug(bench: &mut Bench, kind: &str, fields: Value) {
    let config = Config::of_kind(kind, fields).unwrap().unwrap();
    bench.board.add(kind, |grants| config.build(grants)).unwrap();
}
