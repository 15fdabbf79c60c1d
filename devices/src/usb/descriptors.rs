//! Standard descriptors (USB 2.0, 9.6; USB 3.2, 9.6), built once from the properties of a device.

use super::Speed;

/// Descriptor types.
pub(super) const DEVICE: u8 = 1;
pub(super) const CONFIGURATION: u8 = 2;
pub(super) const STRING: u8 = 3;
const INTERFACE: u8 = 4;
const ENDPOINT: u8 = 5;
pub(super) const QUALIFIER: u8 = 6;
pub(super) const BOS: u8 = 15;
const CAPABILITY: u8 = 16;
const COMPANION: u8 = 48;

/// bmAttributes of a configuration: self-powered.
const SELF_POWERED: u8 = 0xc0;
/// English (United States): the language of strings.
const LANGUAGE: [u8; 2] = [0x09, 0x04];

#[derive(Clone, Debug)]
pub struct Identity {
    pub vendor: u16,
    pub product: u16,
    pub maker: String,
    pub name: String,
    pub serial: String,
}

/// The transfer type of an endpoint (bmAttributes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Bulk = 2,
    Interrupt = 3,
}

#[derive(Clone, Copy, Debug)]
pub struct Endpoint {
    /// bEndpointAddress: bit 7 says that data comes from the device.
    pub address: u8,
    pub kind: Kind,
    /// wMaxPacketSize.
    pub packet: u16,
    /// bInterval.
    pub interval: u8,
}

/// An interface, or an alternate setting of one.
#[derive(Clone, Debug)]
pub struct Interface {
    /// bInterfaceNumber, from 0 on without gaps.
    pub number: u8,
    pub alternate: u8,
    /// Class, subclass, protocol.
    pub class: (u8, u8, u8),
    /// The class descriptors, which follow the interface descriptor.
    pub extra: Vec<u8>,
    pub endpoints: Vec<Endpoint>,
}

#[derive(Clone, Debug)]
pub struct Descriptors {
    /// The speed, which decides the port.
    pub speed: Speed,
    /// The function answers all requests and knows its endpoints: it is a device of the host.
    pub(super) is_transparent: bool,
    pub(super) device: Vec<u8>,
    pub(super) configuration: Vec<u8>,
    /// `None` for a device that supports only one speed.
    pub(super) qualifier: Option<Vec<u8>>,
    pub(super) bos: Option<Vec<u8>>,
    strings: Vec<String>,
    pub(super) interfaces: Vec<Interface>,
}

impl Descriptors {
    /// Builds the descriptors of a device with one configuration, number 1.
    pub fn new(speed: Speed, identity: Identity, interfaces: Vec<Interface>) -> Self {
        let (version, packet): (u16, u8) = match speed {
            Speed::Low => (0x0110, 8),
            Speed::Full => (0x0200, 8),
            Speed::High => (0x0200, 64),
            // USB 3 has the exponent of two here: 2^9 bytes.
            Speed::Super => (0x0300, 9),
        };
        let mut device = vec![18, DEVICE];
        device.extend(version.to_le_bytes());
        // The class is in the interface descriptors.
        device.extend([0, 0, 0, packet]);
        device.extend(identity.vendor.to_le_bytes());
        device.extend(identity.product.to_le_bytes());
        // bcdDevice, the numbers of the three strings, one configuration.
        device.extend([0, 0, 1, 2, 3, 1]);
        // bcdUSB to bMaxPacketSize0, and no configurations at the other speed.
        let qualifier = [&[10, QUALIFIER], &device[2..8], &[0, 0]].concat();
        Self {
            speed,
            is_transparent: false,
            device,
            configuration: configuration(speed, &interfaces),
            qualifier: (speed == Speed::High).then_some(qualifier),
            bos: (speed == Speed::Super).then(bos),
            strings: vec![identity.maker, identity.name, identity.serial],
            interfaces,
        }
    }

    /// The descriptors of a device of the host, which has its own.
    pub fn of_host(speed: Speed) -> Self {
        let (device, configuration, strings, interfaces) = Default::default();
        Self {
            speed,
            is_transparent: true,
            device,
            configuration,
            qualifier: None,
            bos: None,
            strings,
            interfaces,
        }
    }

    /// Number 0 lists the languages.
    pub(super) fn string(&self, number: u8) -> Option<Vec<u8>> {
        let mut descriptor = vec![0, STRING];
        match usize::from(number).checked_sub(1) {
            None => descriptor.extend(LANGUAGE),
            Some(index) => {
                let text = self.strings.get(index)?;
                // The length field is one byte.
                descriptor.extend(text.encode_utf16().take(126).flat_map(u16::to_le_bytes));
            }
        }
        descriptor[0] = u8::try_from(descriptor.len()).expect("cut to fit");
        Some(descriptor)
    }

    /// Whether an interface has this endpoint in any setting.
    pub(super) fn has(&self, address: u8) -> bool {
        let mut all = self.interfaces.iter().flat_map(|interface| &interface.endpoints);
        all.any(|endpoint| endpoint.address == address)
    }
}

fn configuration(speed: Speed, interfaces: &[Interface]) -> Vec<u8> {
    let mut all = Vec::new();
    for interface in interfaces {
        let (class, subclass, protocol) = interface.class;
        let endpoints = u8::try_from(interface.endpoints.len()).expect("at most 30 of ours");
        let (number, alternate) = (interface.number, interface.alternate);
        all.extend([9, INTERFACE, number, alternate, endpoints, class, subclass, protocol, 0]);
        all.extend(&interface.extra);
        for endpoint in &interface.endpoints {
            let [low, high] = endpoint.packet.to_le_bytes();
            let kind = endpoint.kind as u8;
            all.extend([7, ENDPOINT, endpoint.address, kind, low, high, endpoint.interval]);
            if speed == Speed::Super {
                // Bulk: bursts of 16 packets. Otherwise: one packet per interval.
                let bulk = endpoint.kind == Kind::Bulk;
                let bytes = if bulk { [0, 0] } else { endpoint.packet.to_le_bytes() };
                let burst = if bulk { 15 } else { 0 };
                all.extend([6, COMPANION, burst, 0, bytes[0], bytes[1]]);
            }
        }
    }
    let length = u16::try_from(all.len() + 9).expect("a few interfaces of ours").to_le_bytes();
    let count = interfaces.iter().map(|it| it.number + 1).max().unwrap_or(0);
    // One configuration, number 1, without a name. Its current is 2 mA or 8 mA, which has no
    // meaning.
    let head = [9, CONFIGURATION, length[0], length[1], count, 1, 0, SELF_POWERED, 1];
    [&head[..], &all].concat()
}

/// Binary Device Object Store: the capabilities that USB 3 requires, with exit latencies of zero
/// because there are no link power states (U1, U2).
fn bos() -> Vec<u8> {
    // LPM, which USB 3 devices must set (9.6.2.1).
    let usb2 = [7, CAPABILITY, 2, 2, 0, 0, 0];
    // Supports full speed and above, with all functions at full speed.
    let superspeed = [10, CAPABILITY, 3, 0, 0x0e, 0, 1, 0, 0, 0];
    let length = 5 + 7 + 10;
    [&[5, BOS, length, 0, 2][..], &usb2, &superspeed].concat()
}

#[cfg(test)]
mod test {
    use super::*;

    fn example(speed: Speed) -> Descriptors {
        let identity = Identity {
            vendor: 0x1234,
            product: 0x5678,
            maker: "Maker".into(),
            name: "Name".into(),
            serial: "x".repeat(300),
        };
        let endpoint = Endpoint { address: 0x81, kind: Kind::Bulk, packet: 512, interval: 0 };
        let interface = Interface {
            number: 0,
            alternate: 0,
            class: (8, 6, 0x50),
            extra: vec![2, 0x21],
            endpoints: vec![endpoint],
        };
        Descriptors::new(speed, identity, vec![interface])
    }

    #[test]
    fn descriptor_lengths_match_their_length_fields() {
        for speed in [Speed::Low, Speed::Full, Speed::High, Speed::Super] {
            let it = example(speed);
            assert_eq!((it.device.len(), it.device[0]), (18, 18));
            let total = u16::from_le_bytes([it.configuration[2], it.configuration[3]]);
            assert_eq!(it.configuration.len(), usize::from(total));
            let mut rest = &it.configuration[..];
            while let [length, ..] = rest {
                rest = &rest[usize::from(*length)..];
            }
            assert_eq!(it.qualifier.is_some(), speed == Speed::High);
            assert_eq!(it.qualifier.map_or(10, |it| it.len()), 10);
            if let Some(bos) = it.bos {
                assert_eq!(bos.len(), usize::from(bos[2]));
            }
        }
    }

    #[test]
    fn strings_are_truncated_to_the_maximum_length() {
        let it = example(Speed::High);
        assert_eq!(it.string(0).unwrap(), [4, STRING, 9, 4]);
        assert_eq!(it.string(2).unwrap(), b"\x0a\x03N\0a\0m\0e\0");
        assert_eq!(it.string(3).unwrap().len(), 254);
        assert_eq!(it.string(4), None);
        assert!(it.has(0x81) && !it.has(0x01));
    }
}
