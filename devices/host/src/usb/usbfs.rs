//! An open USB device of the host: usbfs (linux/usbdevice_fs.h).
//!
//! Transfers are URBs, which the kernel completes at any time; orders, such as a reset, block until
//! the device has answered, or until the kernel's timeout of 5 seconds.
//!
//! Threats: lengths and states come from the device. The kernel never writes more than the buffer
//! of a URB, and its answers are compared with that buffer again.
#![expect(unsafe_code, reason = "ioctls, with buffers that the kernel fills later")]

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_int, c_uint, c_void};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt as _;
use std::ptr;
use std::sync::{Mutex, MutexGuard};

use anyhow::{Context, ensure};
use rustix::io::Errno;

const SETINTERFACE: libc::Ioctl = 0x8008_5504;
const SETCONFIGURATION: libc::Ioctl = 0x8004_5505;
const SUBMITURB: libc::Ioctl = 0x8038_550a;
const DISCARDURB: libc::Ioctl = 0x550b;
const REAPURBNDELAY: libc::Ioctl = 0x4008_550d;
const RELEASEINTERFACE: libc::Ioctl = 0x8004_5510;
const IOCTL: libc::Ioctl = 0xc010_5512;
const RESET: libc::Ioctl = 0x5514;
const CLEAR_HALT: libc::Ioctl = 0x8004_5515;
const CONNECT: c_int = 0x5517;
const DISCONNECT_CLAIM: libc::Ioctl = 0x8108_551b;
const GET_SPEED: libc::Ioctl = 0x551f;

/// USBDEVFS_DISCONNECT_CLAIM_EXCEPT_DRIVER: another program that uses the interface keeps it.
const EXCEPT_DRIVER: c_uint = 2;
/// USBDEVFS_URB_ISO_ASAP: the packets follow those of the URB before.
const ISO_ASAP: c_uint = 2;

/// The maximum number of packets in an isochronous URB.
pub const MAX_PACKETS: usize = 32;
/// The maximum number of bytes in the descriptors of a device.
const MAX_DESCRIPTORS: usize = 64 << 10;
/// Types of descriptors: configuration, interface and endpoint.
const CONFIGURATION: u8 = 2;
const INTERFACE: u8 = 4;
const ENDPOINT: u8 = 5;
/// Parts of the first byte of a control request (USB 2.0, 9.3).
const IN: u8 = 0x80;
const KIND: u8 = 0x60;
const VENDOR: u8 = 0x40;
const RECIPIENT: u8 = 0x1f;
const INTERFACE_RECIPIENT: u8 = 1;
const ENDPOINT_RECIPIENT: u8 = 2;
/// The first two bytes of a printer's GET_DEVICE_ID.
const GET_DEVICE_ID: (u8, u8) = (0xa1, 0);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    Isochronous = 0,
    Control = 2,
    /// Also for interrupt endpoints: the kernel knows the endpoint's type.
    Bulk = 3,
}

/// A transfer for the kernel.
#[derive(Clone, Debug)]
pub struct Urb {
    pub kind: Kind,
    /// bEndpointAddress.
    pub endpoint: u8,
    /// The number by which the caller knows it.
    pub tag: u64,
    /// Data for the device, or room for data from it. A control transfer has its setup packet
    /// before that.
    pub data: Vec<u8>,
    /// The lengths of isochronous packets, which add up to the data.
    pub packets: Vec<u32>,
}

/// A completed transfer.
#[derive(Clone, Debug)]
pub struct Ended {
    pub tag: u64,
    pub result: Result<(), Errno>,
    /// The buffer of the URB. The setup packet of a control transfer is still in it.
    pub data: Vec<u8>,
    /// The number of bytes that were transferred, without a setup packet.
    pub moved: usize,
    /// The results of isochronous packets, each with its number of bytes.
    pub packets: Vec<Result<u32, Errno>>,
}

/// A change of the whole device, which may take seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Reset,
    /// SET_CONFIGURATION.
    Configure(u8),
    /// SET_INTERFACE: interface and alternate setting.
    Alternate(u8, u8),
    /// CLEAR_FEATURE of ENDPOINT_HALT.
    Clear(u8),
    /// Gives the device back to the host's drivers.
    Release,
}

/// An open device. Tests have a hostile one, which no kernel guards. The kernel locks a device
/// while it carries out an order, for seconds if the device is slow: all other methods wait then.
pub trait Handle: Send + Sync {
    fn submit(&self, urb: Urb) -> io::Result<()>;
    /// Ends a transfer, which is reaped afterwards.
    fn discard(&self, tag: u64);
    /// `None` if nothing has completed. An error if the device is gone.
    fn reap(&self) -> io::Result<Option<Ended>>;
    /// Called on other threads than the other methods. Orders wait for each other, and after
    /// `Release` there are none.
    fn order(&self, order: Order) -> io::Result<()>;
    /// A file descriptor that is writable (as epoll says it) when there is something to reap.
    fn event(&self) -> BorrowedFd<'_>;
}

/// The speed of a device (`enum usb_device_speed`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speed {
    Low,
    Full,
    High,
    Super,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Packet {
    length: c_uint,
    actual_length: c_uint,
    status: c_uint,
}

/// `struct usbdevfs_urb`. Its address is the kernel's name for it.
#[repr(C)]
struct RawUrb {
    kind: u8,
    endpoint: u8,
    status: c_int,
    flags: c_uint,
    /// An address, as a number so that it is `Send`.
    buffer: usize,
    buffer_length: c_int,
    actual_length: c_int,
    start_frame: c_int,
    number_of_packets: c_int,
    error_count: c_int,
    signr: c_uint,
    usercontext: usize,
    packets: [Packet; MAX_PACKETS],
}

/// `struct usbdevfs_disconnect_claim`
#[repr(C)]
struct Claim {
    interface: c_uint,
    flags: c_uint,
    driver: [u8; 256],
}

/// `struct usbdevfs_ioctl`
#[repr(C)]
struct InterfaceIoctl {
    interface: c_int,
    code: c_int,
    data: *mut c_void,
}

struct InFlight {
    urb: Box<RawUrb>,
    data: Vec<u8>,
    tag: u64,
}

/// The parts of a device's descriptors that its use needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Descriptors {
    /// bConfigurationValue of each configuration.
    configurations: Vec<u8>,
    /// The interfaces of all configurations.
    interfaces: BTreeSet<u8>,
    /// The addresses of all endpoints.
    endpoints: BTreeSet<u8>,
}

impl Descriptors {
    /// Reads the device descriptor and the configurations after it. Damaged ones end the list.
    pub fn read(bytes: &[u8]) -> Self {
        let mut it = Self::default();
        let mut rest = bytes;
        while let [length, kind, more @ ..] = rest {
            match (*kind, more) {
                (CONFIGURATION, [_, _, _, value, ..]) => it.configurations.push(*value),
                (INTERFACE, [number, ..]) => drop(it.interfaces.insert(*number)),
                (ENDPOINT, [address, ..]) => drop(it.endpoints.insert(*address)),
                _ => {}
            }
            let Some(next) = rest.get(usize::from(*length).max(2)..) else { break };
            rest = next;
        }
        it
    }
}

pub struct Device {
    file: File,
    descriptors: Descriptors,
    // Dropped after the file: the kernel then knows none of these addresses.
    urbs: Mutex<BTreeMap<usize, InFlight>>,
    state: Mutex<State>,
    /// Locked while an order is carried out. True once the device is given back.
    released: Mutex<bool>,
}

/// The state in which the orders left the device.
#[derive(Default)]
struct State {
    claimed: BTreeSet<u8>,
    /// Alternate settings other than 0, by interface.
    alternates: BTreeMap<u8, u8>,
    /// Whether the guest chose the configuration.
    configured: bool,
}

impl Device {
    /// Takes all interfaces of the device from the host's drivers. Fails if another program uses
    /// one of them.
    pub fn claim(file: File) -> anyhow::Result<(Self, Speed)> {
        let mut bytes = vec![0; MAX_DESCRIPTORS];
        let length = file.read_at(&mut bytes, 0).context("the descriptors of a USB device")?;
        let descriptors = Descriptors::read(&bytes[..length]);
        let (urbs, state, released) = Default::default();
        let device = Self { file, descriptors, urbs, state, released };
        let speed = match device.ioctl(GET_SPEED, ptr::null_mut::<c_int>()) {
            Ok(1) => Speed::Low,
            Ok(2) => Speed::Full,
            Ok(3 | 4) => Speed::High,
            Ok(5 | 6) => Speed::Super,
            Ok(speed) => anyhow::bail!("a USB device of speed {speed}, which is unknown"),
            Err(error) => return Err(error).context("not a device of usbfs"),
        };
        let claimed = device.claim_all();
        if claimed.is_err() {
            device.connect(&device.release_all());
        }
        claimed.context("the interfaces of a USB device, which another program may use")?;
        ensure!(!device.state().claimed.is_empty(), "a USB device without interfaces");
        Ok((device, speed))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no device panicked")
    }

    fn urbs(&self) -> MutexGuard<'_, BTreeMap<usize, InFlight>> {
        self.urbs.lock().expect("no device panicked")
    }

    fn ioctl<T>(&self, code: libc::Ioctl, argument: *mut T) -> io::Result<c_int> {
        // SAFETY: each caller passes the argument that `code` reads or writes, which lives until
        // the call returns; what the kernel keeps longer is in `urbs`, until it is reaped.
        let answer = unsafe { libc::ioctl(self.file.as_raw_fd(), code, argument) };
        if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
    }

    fn number(&self, code: libc::Ioctl, value: u8) -> io::Result<()> {
        let mut value = c_uint::from(value);
        self.ioctl(code, &raw mut value).map(|_| ())
    }

    fn claim_all(&self) -> io::Result<()> {
        for interface in &self.descriptors.interfaces {
            let mut driver = [0; 256];
            driver[..5].copy_from_slice(b"usbfs");
            let mut claim = Claim { interface: (*interface).into(), flags: EXCEPT_DRIVER, driver };
            match self.ioctl(DISCONNECT_CLAIM, &raw mut claim) {
                Ok(_) => drop(self.state().claimed.insert(*interface)),
                // An interface of another configuration.
                Err(error) if is(&error, &[Errno::INVAL, Errno::NOENT]) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn has(&self, recipient: Recipient) -> bool {
        match recipient {
            Recipient::Interface(number) => self.state().claimed.contains(&number),
            Recipient::Endpoint(address) => self.descriptors.endpoints.contains(&address),
            Recipient::Other => true,
        }
    }

    /// Returns the interfaces that were claimed.
    fn release_all(&self) -> BTreeSet<u8> {
        let claimed = std::mem::take(&mut self.state().claimed);
        for interface in &claimed {
            // The device may be gone.
            self.number(RELEASEINTERFACE, *interface).ok();
        }
        claimed
    }

    /// Gives interfaces back to the host's drivers.
    fn connect(&self, interfaces: &BTreeSet<u8>) {
        for interface in interfaces {
            let (interface, data) = (c_int::from(*interface), ptr::null_mut());
            let mut connect = InterfaceIoctl { interface, code: CONNECT, data };
            // Without a driver for the interface, or without the device, there is nothing to do.
            self.ioctl(IOCTL, &raw mut connect).ok();
        }
    }

    fn configure(&self, value: u8) -> io::Result<()> {
        // As QEMU: a device with one configuration has it already, and some dislike to hear of it
        // again. The alternate settings begin anew.
        if let [only] = self.descriptors.configurations[..]
            && (value == only || value == 0)
        {
            let alternates = std::mem::take(&mut self.state().alternates);
            for interface in alternates.into_keys() {
                self.alternate(interface, 0)?;
            }
            return Ok(());
        }
        self.release_all();
        let configured = self.number(SETCONFIGURATION, value);
        self.state().alternates.clear();
        self.state().configured = true;
        self.claim_all()?;
        configured
    }

    fn alternate(&self, interface: u8, setting: u8) -> io::Result<()> {
        let mut pair = [c_uint::from(interface), c_uint::from(setting)];
        self.ioctl(SETINTERFACE, pair.as_mut_ptr())?;
        if setting > 0 {
            self.state().alternates.insert(interface, setting);
        } else {
            self.state().alternates.remove(&interface);
        }
        Ok(())
    }

    /// The reset puts the device into a state that the host's drivers know. If the guest chose a
    /// configuration, the host gets the first one, which it chooses for most devices.
    fn release(&self) {
        let claimed = self.release_all();
        let configured = std::mem::take(&mut self.state().configured);
        if claimed.is_empty() && !configured {
            return;
        }
        self.ioctl(RESET, ptr::null_mut::<c_int>()).ok();
        match self.descriptors.configurations.first() {
            Some(first) if configured => {
                self.number(SETCONFIGURATION, *first).ok();
                self.connect(&self.descriptors.interfaces);
            }
            _ => self.connect(&claimed),
        }
    }
}

fn is(error: &io::Error, errors: &[Errno]) -> bool {
    Errno::from_io_error(error).is_some_and(|it| errors.contains(&it))
}

/// A status of the kernel: 0, or an error as a negative number.
fn result(status: c_int) -> Result<(), Errno> {
    match status.wrapping_neg() {
        0 => Ok(()),
        error @ 1..=4095 => Err(Errno::from_raw_os_error(error)),
        _ => Err(Errno::IO),
    }
}

/// The interface or endpoint that a control request is for, and that must be the guest's: for any
/// other, the kernel refuses the request and writes a line into its log (`check_ctrlrecip`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Recipient {
    Interface(u8),
    Endpoint(u8),
    Other,
}

impl Recipient {
    fn of(setup: &[u8]) -> Self {
        let [kind, request, _, _, index, high, ..] = *setup else { return Self::Other };
        match kind & RECIPIENT {
            _ if kind & KIND == VENDOR => Self::Other,
            // A printer's identity: the interface is in the other byte.
            _ if (kind, request) == GET_DEVICE_ID => Self::Interface(high),
            INTERFACE_RECIPIENT => Self::Interface(index),
            // Endpoint 0 is always there.
            ENDPOINT_RECIPIENT if index & !IN != 0 => Self::Endpoint(index),
            _ => Self::Other,
        }
    }
}

impl Handle for Device {
    fn submit(&self, urb: Urb) -> io::Result<()> {
        let Urb { kind, endpoint, tag, mut data, packets } = urb;
        if kind == Kind::Control && !self.has(Recipient::of(&data)) {
            return Err(Errno::PIPE.into());
        }
        let length = c_int::try_from(data.len()).map_err(|_| Errno::INVAL)?;
        let sum: u64 = packets.iter().copied().map(u64::from).sum();
        if packets.len() > MAX_PACKETS || kind == Kind::Isochronous && sum != data.len() as u64 {
            return Err(Errno::INVAL.into());
        }
        let isochronous = kind == Kind::Isochronous;
        let mut raw = Box::new(RawUrb {
            kind: kind as u8,
            endpoint: if kind == Kind::Control { 0 } else { endpoint },
            status: 0,
            flags: if isochronous { ISO_ASAP } else { 0 },
            buffer: data.as_mut_ptr().expose_provenance(),
            buffer_length: length,
            actual_length: 0,
            start_frame: 0,
            number_of_packets: c_int::try_from(packets.len()).map_err(|_| Errno::INVAL)?,
            error_count: 0,
            signr: 0,
            usercontext: 0,
            packets: [Packet::default(); MAX_PACKETS],
        });
        for (packet, length) in raw.packets.iter_mut().zip(packets) {
            packet.length = length;
        }
        let address: *mut RawUrb = &raw mut *raw;
        let mut urbs = self.urbs();
        let key = address.expose_provenance();
        urbs.insert(key, InFlight { urb: raw, data, tag });
        let submitted = self.ioctl(SUBMITURB, address);
        if submitted.is_err() {
            urbs.remove(&key);
        }
        submitted.map(|_| ())
    }

    fn discard(&self, tag: u64) {
        let urbs = self.urbs();
        if let Some((key, _)) = urbs.iter().find(|(_, it)| it.tag == tag) {
            // It fails if the transfer is complete.
            self.ioctl(DISCARDURB, ptr::with_exposed_provenance_mut::<RawUrb>(*key)).ok();
        }
    }

    fn reap(&self) -> io::Result<Option<Ended>> {
        let mut key = 0_usize;
        match self.ioctl(REAPURBNDELAY, &raw mut key) {
            Ok(_) => {}
            Err(error) if is(&error, &[Errno::AGAIN]) => return Ok(None),
            Err(error) => return Err(error),
        }
        let Some(InFlight { urb, data, tag }) = self.urbs().remove(&key) else { return Ok(None) };
        let number = |value: c_int| usize::try_from(value).unwrap_or(0);
        let packets = urb.packets.iter().take(number(urb.number_of_packets)).map(|packet| {
            let moved = packet.actual_length.min(packet.length);
            result(packet.status.cast_signed()).map(|()| moved)
        });
        let moved = number(urb.actual_length).min(data.len());
        Ok(Some(Ended { tag, result: result(urb.status), packets: packets.collect(), moved, data }))
    }

    fn order(&self, order: Order) -> io::Result<()> {
        let mut released = self.released.lock().expect("no order panicked");
        if *released {
            return Err(Errno::NODEV.into());
        }
        match order {
            Order::Reset => self.ioctl(RESET, ptr::null_mut::<c_int>()).map(|_| ()),
            Order::Configure(value) => self.configure(value),
            Order::Alternate(interface, setting) => self.alternate(interface, setting),
            Order::Clear(endpoint) => self.number(CLEAR_HALT, endpoint),
            Order::Release => {
                *released = true;
                self.release();
                Ok(())
            }
        }
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn descriptors_name_configurations_and_interfaces() {
        let device = [18, 1, 0, 2, 0, 0, 0, 64, 1, 2, 3, 4, 0, 1, 1, 2, 3, 1];
        let configuration = [9, 2, 32, 0, 2, 1, 0, 0x80, 50];
        let interface = |number| [9, 4, number, 0, 2, 8, 6, 0x50, 0];
        let endpoint = [7, 5, 0x81, 2, 0, 2, 0];
        let good = [
            &device[..],
            &configuration,
            &interface(0),
            &endpoint,
            &interface(1),
            &interface(1),
            &endpoint,
        ]
        .concat();
        let read = Descriptors::read(&good);
        assert_eq!(read.configurations, [1]);
        assert_eq!((read.interfaces, read.endpoints), ([0, 1].into(), [0x81].into()));
        // Descriptors that are too short, too long, or cut.
        assert_eq!(Descriptors::read(&[]), Descriptors::default());
        assert_eq!(Descriptors::read(&[0, 4, 7]).interfaces, [7].into());
        for end in 0..good.len() {
            Descriptors::read(&good[..end]);
        }
        assert_eq!(Descriptors::read(&[0; 4096]), Descriptors::default());
        assert_eq!(Descriptors::read(&[255, 4, 3, 0]).interfaces, [3].into());
    }

    #[test]
    fn requests_name_the_interface_or_endpoint_that_the_kernel_checks() {
        let of = |kind, request, index| Recipient::of(&[kind, request, 0, 0, index, 7, 2, 0]);
        for kind in [0x01, 0x21, 0x81, 0xa1] {
            assert_eq!(of(kind, 9, 3), Recipient::Interface(3));
        }
        assert_eq!(of(0xa1, 0, 3), Recipient::Interface(7));
        assert_eq!(of(0x82, 0, 0x81), Recipient::Endpoint(0x81));
        for (kind, index) in [(0x80, 3), (0xc1, 3), (0x42, 3), (0x82, 0x80), (0x02, 0), (0x83, 1)] {
            assert_eq!(of(kind, 0, index), Recipient::Other, "{kind:#x}");
        }
        assert_eq!(Recipient::of(&[1]), Recipient::Other);
    }

    #[test]
    fn a_status_is_an_error_of_the_kernel() {
        assert_eq!(result(0), Ok(()));
        assert_eq!(result(-libc::EPIPE), Err(Errno::PIPE));
        for status in [1, i32::MIN, i32::MAX, -4096] {
            assert_eq!(result(status), Err(Errno::IO));
        }
    }

    #[test]
    fn a_file_of_another_kind_is_refused() {
        let file = tempfile::tempfile().unwrap();
        let error = Device::claim(file).map(|_| ()).unwrap_err();
        assert!(format!("{error:#}").contains("not a device of usbfs"), "{error:#}");
    }
}
