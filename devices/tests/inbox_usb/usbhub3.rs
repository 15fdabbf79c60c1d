//! A model of usbhub3 on a root hub, and of usbccgp: ports, enumeration, configuration, power.

use devices::testutil::Bench;
use devices::testutil::xhci::block;

use super::usbxhci::{
    ADDRESS_DEVICE, CONFIGURE_ENDPOINT, DISABLE_SLOT, ENABLE_SLOT, EVALUATE_CONTEXT, NO_OP, PORT,
    RESET_DEVICE, STALL, STOP_ENDPOINT, STOPPED, SUCCESS, Xhci, of,
};

/// PORTSC (xHCI 5.4.8).
pub(crate) const CONNECTED: u32 = 1 << 0;
pub(crate) const ENABLED: u32 = 1 << 1;
pub(crate) const RESET: u32 = 1 << 4;
pub(crate) const STROBE: u32 = 1 << 16;
pub(crate) const CONNECT_CHANGE: u32 = 1 << 17;
pub(crate) const WARM_RESET_CHANGE: u32 = 1 << 19;
pub(crate) const RESET_CHANGE: u32 = 1 << 21;
pub(crate) const LINK_CHANGE: u32 = 1 << 22;
pub(crate) const WARM_RESET: u32 = 1 << 31;

/// Port link states.
pub(crate) const U0: u32 = 0;
pub(crate) const U3: u32 = 3;
pub(crate) const DISABLED: u32 = 4;
pub(crate) const RX_DETECT: u32 = 5;
pub(crate) const RESUME: u32 = 15;

const SUPER: u32 = 4;
/// Block Set Address Request.
const BLOCK: u32 = 1 << 9;

/// Slot states.
pub(crate) const DEFAULT: u32 = 1;
pub(crate) const ADDRESSED: u32 = 2;
pub(crate) const CONFIGURED: u32 = 3;

/// The state of an endpoint that runs.
const RUNNING: u32 = 1;

/// Descriptors, as in wValue: the type in the upper half.
const DEVICE: u16 = 1 << 8;
const CONFIGURATION: u16 = 2 << 8;
const STRING: u16 = 3 << 8;
const BOS: u16 = 15 << 8;
/// The string of Microsoft's OS descriptors.
const OS_STRING: u16 = STRING | 0xee;

/// Descriptor types.
const INTERFACE: u8 = 4;
const ENDPOINT: u8 = 5;
const COMPANION: u8 = 48;

/// A device's port and slot, and the ID of its speed.
#[derive(Clone, Copy)]
struct Location {
    port: u8,
    slot: u8,
    speed: u32,
}

pub(crate) struct Device {
    pub(crate) port: u8,
    pub(crate) slot: u8,
    pub(crate) speed: u32,
    pub(crate) device: Vec<u8>,
    pub(crate) configuration: Vec<u8>,
    pub(crate) bos: Option<Vec<u8>>,
    pub(crate) product: String,
    pub(crate) serial: String,
}

/// An endpoint descriptor, and the burst of its companion.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pipe {
    pub(crate) number: u8,
    kind: u8,
    packet: u16,
    interval: u8,
    burst: u8,
    payload: u16,
}

impl Device {
    /// The descriptors in the configuration, without its head.
    fn parts(&self) -> Vec<&[u8]> {
        let mut rest = &self.configuration[9..];
        let mut parts = Vec::new();
        while let [length, ..] = rest {
            let (part, after) = rest.split_at(usize::from(*length));
            (rest, parts) = (after, [parts, vec![part]].concat());
        }
        parts
    }

    pub(crate) fn pipes(&self) -> Vec<Pipe> {
        let mut pipes: Vec<Pipe> = Vec::new();
        for part in self.parts() {
            match (part[1], pipes.last_mut()) {
                (ENDPOINT, _) => pipes.push(Pipe {
                    number: (part[2] & 0xf) << 1 | part[2] >> 7,
                    kind: part[3] & 3,
                    packet: u16::from_le_bytes([part[4], part[5]]),
                    interval: part[6],
                    burst: 0,
                    payload: u16::from_le_bytes([part[4], part[5]]),
                }),
                (COMPANION, Some(pipe)) => {
                    pipe.burst = part[2];
                    pipe.payload = u16::from_le_bytes([part[4], part[5]]);
                }
                _ => {}
            }
        }
        pipes
    }

    /// Class, subclass and protocol of each interface.
    pub(crate) fn classes(&self) -> Vec<[u8; 3]> {
        let interfaces = self.parts().into_iter().filter(|it| it[1] == INTERFACE);
        interfaces.map(|it| [it[5], it[6], it[7]]).collect()
    }
}

/// Waits for a change of a port, and clears its changes as the driver does: one write for all that
/// were read. Returns PORTSC from before.
pub(crate) fn wait_change(xhci: &mut Xhci, port: u8, change: u32) -> u32 {
    let at = |it: u32| it.to_le_bytes()[3];
    let what = format!("port {port}, change {change:#x}, PORTSC {:#x}", xhci.port(port));
    loop {
        xhci.wait_event(&what, |it| it.kind() == PORT && at(it.0[0]) == port);
        let status = xhci.port(port);
        xhci.set_port(port, status & 0x7f << 17);
        if status & change != 0 {
            return status;
        }
    }
}

/// Resets a port (spec, 4.19.5): `RESET`, or `WARM_RESET` for USB 3.
pub(crate) fn reset_port(xhci: &mut Xhci, port: u8, kind: u32) {
    xhci.set_port(port, kind);
    let status = wait_change(xhci, port, RESET_CHANGE);
    assert_eq!(status & (CONNECTED | ENABLED | RESET), CONNECTED | ENABLED, "{status:#x}");
    assert_eq!(status >> 5 & 0xf, U0);
    assert_eq!(status & WARM_RESET_CHANGE != 0, kind == WARM_RESET, "{status:#x}");
}

pub(crate) fn get_descriptor(
    xhci: &mut Xhci,
    slot: u8,
    what: u16,
    language: u16,
    length: u16,
) -> Result<Vec<u8>, u32> {
    let [index, kind] = what.to_le_bytes();
    let ([a, b], [c, d]) = (language.to_le_bytes(), length.to_le_bytes());
    let mut data = vec![0; length.into()];
    let moved = xhci.control(slot, [0x80, 6, index, kind, a, b, c, d], &mut data)?;
    data.truncate(moved);
    Ok(data)
}

/// Address Device with or without SET_ADDRESS. The control endpoint goes on where it is.
fn address(xhci: &mut Xhci, at: Location, packet: u32, blocked: u32) {
    let Location { port, slot, speed } = at;
    let pointer = xhci.ring(slot, 1).pointer();
    let input = xhci.devices[&slot].1;
    xhci.write(input, &[0; 0x420]);
    let control = [3 << 1 | 4 << 3 | packet << 16];
    let device = [speed << 20 | 1 << 27, u32::from(port) << 16, Xhci::target(slot)];
    words(xhci, input, &[0, 3]);
    words(xhci, input + 0x20, &device);
    words(xhci, input + 0x44, &control);
    xhci.write(input + 0x48, &pointer.to_le_bytes());
    words(xhci, input + 0x50, &[8]);
    let (code, _) = xhci.command(block(input, 0, ADDRESS_DEVICE | blocked | of(slot, 0)));
    assert_eq!(code, SUCCESS, "address device");
}

fn words(xhci: &Xhci, at: u64, words: &[u32]) {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    xhci.write(at, &bytes);
}

/// Enumerates the device at a port, whose connection was not handled yet.
pub(crate) fn enumerate(xhci: &mut Xhci, port: u8) -> Device {
    // enumeration: a change of the connection, then (for USB 2) the first reset.
    let status = wait_change(xhci, port, CONNECT_CHANGE);
    assert!(status & CONNECTED != 0, "{status:#x}");
    let is_super = xhci.port(port) >> 10 & 0xf == SUPER;
    // conjecture: a USB 3 port that trained its link is not reset. All are enabled after that.
    if !is_super {
        reset_port(xhci, port, RESET);
    }
    let status = xhci.port(port);
    assert_eq!(status & (CONNECTED | ENABLED), CONNECTED | ENABLED);
    let speed = status >> 10 & 0xf;
    // usb3kd (commandring): ENABLE_SLOT, then ADDRESS_DEVICE with BlockSetAddressRequest 1; UCX:
    // EVT_UCX_USBDEVICE_ENABLE prepares the default control endpoint.
    let (code, slot) = xhci.command(block(0, 0, ENABLE_SLOT));
    assert_eq!(code, SUCCESS, "enable slot");
    xhci.give_contexts(slot);
    xhci.give_ring(slot, 1, 2);
    let packet = if is_super { 512 } else { 64 };
    let at = Location { port, slot, speed };
    address(xhci, at, packet, BLOCK);
    assert_eq!(xhci.state(slot, 0), DEFAULT);
    // enumeration: 64 bytes, of which the driver needs the first 8.
    let first = get_descriptor(xhci, slot, DEVICE, 0, 64).unwrap();
    assert!(first.len() >= 8, "{first:x?}");
    let declared = if is_super { 1 << first[7] } else { u32::from(first[7]) };
    // UCX (EVT_UCX_USBDEVICE_UPDATE): the packet size is not that of the speed.
    if declared != packet {
        update(xhci, slot, (1, 1, declared << 16));
    }
    // enumeration: the second reset, then the address. A slot in the default state needs no Reset
    // Device command (4.6.11).
    if !is_super {
        reset_port(xhci, port, RESET);
    }
    address(xhci, at, declared, 0);
    assert_eq!(xhci.state(slot, 0), ADDRESSED);
    describe(xhci, at)
}

/// Reads the descriptors of an addressed device.
fn describe(xhci: &mut Xhci, at: Location) -> Device {
    let Location { port, slot, speed } = at;
    // enumeration: the whole device descriptor, and the configuration with 255 bytes at first.
    let device = get_descriptor(xhci, slot, DEVICE, 0, 18).unwrap();
    assert_eq!((device.len(), device[0], device[1]), (18, 18, 1));
    // LPM; OS descriptors: version 2.0 is in the BOS, which versions above 2.00 have.
    let version = u16::from_le_bytes([device[2], device[3]]);
    let bos = (version > 0x200).then(|| {
        let head = get_descriptor(xhci, slot, BOS, 0, 5).unwrap();
        let total = u16::from_le_bytes([head[2], head[3]]);
        let bos = get_descriptor(xhci, slot, BOS, 0, total).unwrap();
        assert_eq!(bos.len(), usize::from(total));
        bos
    });
    let configuration = get_descriptor(xhci, slot, CONFIGURATION, 0, 255).unwrap();
    let total = u16::from_le_bytes([configuration[2], configuration[3]]);
    assert_eq!(configuration.len(), usize::from(total), "less than 255 bytes here");
    // OS descriptors: string 0xEE of 18 bytes. A device without them must stall, and works on.
    let os = get_descriptor(xhci, slot, OS_STRING, 0, 18);
    assert_eq!(os, Err(STALL));
    // enumeration: serial number and product, in the first language of string 0.
    let languages = get_descriptor(xhci, slot, STRING, 0, 255).unwrap();
    let language = u16::from_le_bytes([languages[2], languages[3]]);
    let mut string = |index| {
        let data = get_descriptor(xhci, slot, STRING | u16::from(index), language, 255).unwrap();
        assert_eq!((data.len(), data[1]), (usize::from(data[0]), 3));
        let units: Vec<u16> =
            data[2..].as_chunks::<2>().0.iter().map(|it| u16::from_le_bytes(*it)).collect();
        String::from_utf16(&units).unwrap()
    };
    let (serial, product) = (string(device[16]), string(device[15]));
    Device { port, slot, speed, device, configuration, bos, product, serial }
}

/// Evaluate Context: changes one word of a context.
pub(crate) fn update(xhci: &mut Xhci, slot: u8, (number, word, value): (u8, u64, u32)) {
    let input = xhci.devices[&slot].1;
    xhci.write(input, &[0; 0x420]);
    words(xhci, input, &[0, 1 << number]);
    words(xhci, input + 0x20 * (u64::from(number) + 1) + 4 * word, &[value]);
    let (code, _) = xhci.command(block(input, 0, EVALUATE_CONTEXT | of(slot, 0)));
    assert_eq!(code, SUCCESS, "evaluate context");
}

/// Configures a device: first the controller (UCX, EVT_UCX_USBDEVICE_ENDPOINTS_CONFIGURE), then the
/// device. The function driver reads the configuration again before this.
pub(crate) fn configure(xhci: &mut Xhci, device: &Device) {
    let slot = device.slot;
    // Traces of function drivers (usbstor, hidusb, usbccgp): the head, then the whole.
    let head = get_descriptor(xhci, slot, CONFIGURATION, 0, 9).unwrap();
    let total = u16::from_le_bytes([head[2], head[3]]);
    let whole = get_descriptor(xhci, slot, CONFIGURATION, 0, total).unwrap();
    assert_eq!(whole, device.configuration);
    add_endpoints(xhci, device);
    assert_eq!(xhci.state(slot, 0), CONFIGURED);
    assert_eq!(xhci.control(slot, [0, 9, whole[5], 0, 0, 0, 0, 0], &mut []), Ok(0));
    if device.speed == SUPER {
        save_link_power(xhci, device);
    }
}

fn add_endpoints(xhci: &mut Xhci, device: &Device) {
    let slot = device.slot;
    let (input, pipes) = (xhci.devices[&slot].1, device.pipes());
    xhci.write(input, &[0; 0x420]);
    let add = pipes.iter().fold(1, |bits, it| bits | 1 << it.number);
    let last = pipes.iter().map(|it| u32::from(it.number)).max().unwrap();
    words(xhci, input, &[0, add]);
    let port = u32::from(device.port) << 16;
    words(xhci, input + 0x20, &[device.speed << 20 | last << 27, port, Xhci::target(slot)]);
    for it in pipes {
        let pointer = xhci.give_ring(slot, it.number, 2);
        let at = input + 0x20 * (u64::from(it.number) + 1);
        // 2, 3: bulk and interrupt; 4 more if data comes from the device.
        let kind = u32::from(it.kind) | u32::from(it.number & 1) << 2;
        let (burst, packet) = (u32::from(it.burst) << 8, u32::from(it.packet) << 16);
        let interrupt = it.kind == 3;
        let interval = if interrupt { u32::from(it.interval - 1) << 16 } else { 0 };
        let payload = if interrupt { u32::from(it.payload) << 16 } else { 0 };
        words(xhci, at, &[interval, 3 << 1 | kind << 3 | burst | packet]);
        xhci.write(at + 8, &pointer.to_le_bytes());
        words(xhci, at + 16, &[payload | 1024]);
    }
    let (code, _) = xhci.command(block(input, 0, CONFIGURE_ENDPOINT | of(slot, 0)));
    assert_eq!(code, SUCCESS, "configure endpoint");
}

/// Lets the link of a SuperSpeed device sleep (LPM: exit latencies from the BOS, SET_SEL, timeouts
/// of the port, and U1 and U2 that the device initiates; USB 3.2, 9.4.9 and 9.4.12).
fn save_link_power(xhci: &mut Xhci, device: &Device) {
    let slot = device.slot;
    assert_eq!(xhci.control(slot, [0, 49, 40, 0, 0, 0, 0, 0], &mut []), Ok(0), "isochronous delay");
    update(xhci, slot, (0, 1, 100));
    let mut latencies = [10, 10, 100, 0, 100, 0];
    assert_eq!(xhci.control(slot, [0, 48, 0, 0, 0, 0, 6, 0], &mut latencies), Ok(6), "latencies");
    // FORCE_LINKPM_ACCEPT stays clear.
    xhci.set_power(device.port, 0x7f | 0x20 << 8);
    assert_eq!(xhci.power(device.port), 0x7f | 0x20 << 8);
    for feature in [48, 49] {
        assert_eq!(xhci.control(slot, [0, 3, feature, 0, 0, 0, 0, 0], &mut []), Ok(0), "U1, U2");
    }
}

/// Resets a configured device (UCX, EVT_UCX_USBDEVICE_RESET; `IOCTL_INTERNAL_USB_RESET_PORT`), and
/// configures it again.
pub(crate) fn reset_device(xhci: &mut Xhci, device: &Device, kind: u32) {
    let (slot, port) = (device.slot, device.port);
    stop_all(xhci, device);
    reset_port(xhci, port, kind);
    assert_eq!(xhci.command(block(0, 0, RESET_DEVICE | of(slot, 0))).0, SUCCESS);
    assert_eq!(xhci.state(slot, 0), DEFAULT);
    let packet = if device.speed == SUPER { 512 } else { u32::from(device.device[7]) };
    address(xhci, Location { port, slot, speed: device.speed }, packet, 0);
    // conjecture: the device must still be the same.
    let again = get_descriptor(xhci, slot, DEVICE, 0, 18).unwrap();
    assert_eq!(again, device.device);
    configure(xhci, device);
}

/// Stops an endpoint (UCX, EVT_UCX_ENDPOINT_ABORT). Returns whether a transfer was stopped.
pub(crate) fn stop(xhci: &mut Xhci, slot: u8, endpoint: u8) -> bool {
    assert_eq!(xhci.endpoint_command(STOP_ENDPOINT, slot, endpoint), SUCCESS);
    assert_eq!(xhci.state(slot, endpoint), 3, "stopped");
    // Its event comes before that of the command (4.6.9), perhaps at another interrupter.
    xhci.command(block(0, 0, NO_OP));
    let before = xhci.heard.len();
    let is_it = |code, at: (u8, u8)| code == STOPPED && at == (slot, endpoint);
    xhci.heard.retain(|it| !is_it(it.code(), (it.slot(), it.endpoint())));
    xhci.heard.len() < before
}

fn stop_all(xhci: &mut Xhci, device: &Device) {
    for pipe in device.pipes() {
        // A stopped endpoint is in this state until its next transfer.
        if xhci.state(device.slot, pipe.number) == RUNNING {
            stop(xhci, device.slot, pipe.number);
        }
    }
}

/// Sets the link state of a port (LWS).
pub(crate) fn set_link(xhci: &Xhci, port: u8, state: u32) {
    xhci.set_port(port, STROBE | state << 5);
}

/// Suspends a device (selective suspend): its endpoints stop, then the link goes to U3.
pub(crate) fn suspend(xhci: &mut Xhci, device: &Device) {
    stop_all(xhci, device);
    set_link(xhci, device.port, U3);
    xhci.wait_until("suspended", |it| it.port(device.port) >> 5 & 0xf == U3);
}

/// Resumes a device. At USB 2, the driver signals it for 20 ms (QEMU: Windows writes this state).
pub(crate) fn resume(xhci: &mut Xhci, device: &Device) {
    if device.speed != SUPER {
        set_link(xhci, device.port, RESUME);
        assert_eq!(xhci.port(device.port) >> 5 & 0xf, RESUME);
    }
    set_link(xhci, device.port, U0);
    let status = wait_change(xhci, device.port, LINK_CHANGE);
    assert_eq!(status >> 5 & 0xf, U0);
}

/// Gives up the slot of a device (UCX, EVT_UCX_USBDEVICE_DISABLE).
pub(crate) fn remove(xhci: &mut Xhci, slot: u8) {
    assert_eq!(xhci.command(block(0, 0, DISABLE_SLOT | of(slot, 0))).0, SUCCESS);
    assert_eq!(xhci.state(slot, 0), 0, "disabled");
    xhci.devices.remove(&slot);
}

/// A started controller, and the configured device at this port.
pub(crate) fn started(bench: &Bench, port: u8) -> (Xhci, Device) {
    let mut xhci = Xhci::find(bench);
    xhci.start();
    let device = enumerate(&mut xhci, port);
    configure(&mut xhci, &device);
    (xhci, device)
}
