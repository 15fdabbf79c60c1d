//! A DHCP server (RFC 2131 and 2132) for one guest with one address. A pure function of messages.
//!
//! Threats: the guest sends any bytes, in any order and number. Options are read within their
//! field, lengths are checked, no state is kept between messages, and answers have a maximum size.
//! Only the guest's MAC address gets answers.

use std::net::Ipv4Addr;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use host::mac::Mac;

use super::dns;
use crate::log::LineLimit;

/// Limits the log messages on declined addresses per minute. The guest may decline at any rate.
static DECLINES: Mutex<LineLimit> = Mutex::new(LineLimit::new(3));

pub const SERVER_PORT: u16 = 67;
pub const CLIENT_PORT: u16 = 68;
/// Duration of a lease. The guest renews it after half of this time.
const LEASE_SECONDS: u32 = 3600;

/// Bytes of the fields before the options (RFC 951).
const HEADER: usize = 236;
/// The minimum size of a message that some clients require, in bytes.
const MIN_MESSAGE: usize = 300;
const COOKIE: [u8; 4] = [99, 130, 83, 99];
/// The size of an IP packet that every client accepts, in bytes (RFC 2131, 2).
const PACKET: u16 = 576;
/// Bytes of the headers of IP and UDP.
const IP_HEADERS: usize = 28;

// Types of messages (RFC 2131, 3).
const DISCOVER: u8 = 1;
const OFFER: u8 = 2;
const REQUEST: u8 = 3;
const DECLINE: u8 = 4;
const ACK: u8 = 5;
const NAK: u8 = 6;
const INFORM: u8 = 8;

/// Options (RFC 2132).
mod option {
    pub(super) const PAD: u8 = 0;
    pub(super) const MASK: u8 = 1;
    pub(super) const ROUTER: u8 = 3;
    pub(super) const DNS: u8 = 6;
    pub(super) const HOST: u8 = 12;
    pub(super) const DOMAIN: u8 = 15;
    pub(super) const MTU: u8 = 26;
    pub(super) const BROADCAST: u8 = 28;
    pub(super) const ADDRESS: u8 = 50;
    pub(super) const LEASE: u8 = 51;
    pub(super) const OVERLOAD: u8 = 52;
    pub(super) const KIND: u8 = 53;
    pub(super) const SERVER: u8 = 54;
    pub(super) const MAX_SIZE: u8 = 57;
    pub(super) const RENEW: u8 = 58;
    pub(super) const REBIND: u8 = 59;
    pub(super) const CLIENT: u8 = 61;
    /// RFC 3397.
    pub(super) const SEARCH: u8 = 119;
    pub(super) const END: u8 = 255;
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Other clients get no answer.
    pub mac: Mac,
    pub address: Ipv4Addr,
    /// Prefix length of the guest's network.
    pub mask: u8,
    /// The guest's router, which is also the DHCP server.
    pub gateway: Ipv4Addr,
    pub dns: Ipv4Addr,
    pub host: String,
    /// Search domains. The first one is the guest's own domain.
    pub search: Vec<String>,
    /// MTU in bytes, unless it is the default of Ethernet.
    pub mtu: Option<u16>,
}

/// A response, sent from [`SERVER_PORT`] to [`CLIENT_PORT`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Destination address. `BROADCAST` while the guest has no address.
    pub to: Ipv4Addr,
    pub payload: Vec<u8>,
}

pub fn answer(config: &Config, message: &[u8]) -> Option<Answer> {
    let request = Request::read(message).filter(|it| it.mac == config.mac)?;
    let (kind, to) = match request.kind {
        DISCOVER => (OFFER, Ipv4Addr::BROADCAST),
        REQUEST => decide(config, &request)?,
        // The guest already has its address, and asks for the other options.
        INFORM if request.current == config.address => (ACK, request.current),
        DECLINE => {
            let mut lines = DECLINES.lock().unwrap_or_else(PoisonError::into_inner);
            if lines.take(Instant::now()) {
                tracing::warn!("the guest declines {}: another host has it", config.address);
            }
            return None;
        }
        // A released address stays reserved for the guest, which is the only client.
        _ => return None,
    };
    Some(Answer { to, payload: write(config, &request, kind) })
}

/// Decides whether the guest may have the address that it wants (RFC 2131, 4.3.2).
fn decide(config: &Config, request: &Request<'_>) -> Option<(u8, Ipv4Addr)> {
    if request.server.is_some_and(|server| server != config.gateway) {
        // The guest accepted the offer of another server.
        return None;
    }
    let renews = request.wanted.is_none();
    let wanted = request.wanted.unwrap_or(request.current);
    if wanted.is_unspecified() {
        return None;
    }
    if wanted != config.address {
        return Some((NAK, Ipv4Addr::BROADCAST));
    }
    Some((ACK, if renews { request.current } else { Ipv4Addr::BROADCAST }))
}

struct Request<'a> {
    kind: u8,
    transaction: [u8; 4],
    flags: [u8; 2],
    /// The address that the guest uses, or unspecified.
    current: Ipv4Addr,
    mac: Mac,
    wanted: Option<Ipv4Addr>,
    server: Option<Ipv4Addr>,
    /// The maximum size of an IP packet with the response, in bytes.
    max_size: u16,
    client: Option<&'a [u8]>,
}

impl<'a> Request<'a> {
    fn read(message: &'a [u8]) -> Option<Self> {
        let (header, rest) = message.split_at_checked(HEADER)?;
        let options = rest.strip_prefix(&COOKIE)?;
        // A request, by Ethernet, with six bytes of address, and not through a relay.
        if header[..3] != [1, 1, 6] || header[24..28] != [0; 4] {
            return None;
        }
        let mut request = Self {
            kind: 0,
            transaction: header[4..8].try_into().ok()?,
            flags: header[10..12].try_into().ok()?,
            current: address(&header[12..16])?,
            mac: Mac(header[28..34].try_into().ok()?),
            wanted: None,
            server: None,
            max_size: PACKET,
            client: None,
        };
        let overload = request.take(options);
        if overload & 1 != 0 {
            request.take(&header[108..236]);
        }
        if overload & 2 != 0 {
            request.take(&header[44..108]);
        }
        Some(request)
    }

    /// Takes the options of a field. Returns bits for the other fields that have options.
    fn take(&mut self, mut field: &'a [u8]) -> u8 {
        let mut overload = 0;
        while let Some((code, rest)) = field.split_first() {
            field = rest;
            match *code {
                option::PAD => continue,
                option::END => break,
                _ => {}
            }
            let Some((length, rest)) = field.split_first() else { break };
            let Some((value, rest)) = rest.split_at_checked(usize::from(*length)) else { break };
            field = rest;
            match (*code, value) {
                (option::KIND, [kind]) => self.kind = *kind,
                (option::OVERLOAD, [fields]) => overload = *fields,
                (option::ADDRESS, value) => self.wanted = address(value),
                (option::SERVER, value) => self.server = address(value),
                (option::MAX_SIZE, [high, low]) => {
                    self.max_size = u16::from_be_bytes([*high, *low]);
                }
                (option::CLIENT, value) => self.client = Some(value),
                _ => {}
            }
        }
        overload
    }
}

fn address(bytes: &[u8]) -> Option<Ipv4Addr> {
    <[u8; 4]>::try_from(bytes).ok().map(Ipv4Addr::from)
}

fn write(config: &Config, request: &Request<'_>, kind: u8) -> Vec<u8> {
    let mut message = vec![0; HEADER];
    message[..3].copy_from_slice(&[2, 1, 6]);
    message[4..8].copy_from_slice(&request.transaction);
    message[10..12].copy_from_slice(&request.flags);
    if kind != NAK {
        message[12..16].copy_from_slice(&request.current.octets());
        if request.kind != INFORM {
            message[16..20].copy_from_slice(&config.address.octets());
        }
    }
    message[28..34].copy_from_slice(&request.mac.0);
    message.extend(COOKIE);
    let max_size = usize::from(request.max_size.clamp(PACKET, 1500)) - IP_HEADERS;
    let mut options = Options { message, max_size };
    options.add(option::KIND, &[kind]);
    options.add(option::SERVER, &config.gateway.octets());
    // A client with an identifier expects it in the response (RFC 6842).
    if let Some(client) = request.client {
        options.add(option::CLIENT, client);
    }
    if kind != NAK {
        add_config(config, request.kind != INFORM, &mut options);
    }
    options.end()
}

/// Adds the guest's configuration, with the times of the lease if there is one.
fn add_config(config: &Config, lease: bool, options: &mut Options) {
    if lease {
        options.add(option::LEASE, &LEASE_SECONDS.to_be_bytes());
        options.add(option::RENEW, &(LEASE_SECONDS / 2).to_be_bytes());
        options.add(option::REBIND, &(LEASE_SECONDS / 8 * 7).to_be_bytes());
    }
    let mask = u32::MAX.checked_shl(32 - u32::from(config.mask.min(32))).unwrap_or(0);
    let broadcast = Ipv4Addr::from(u32::from(config.address) | !mask);
    options.add(option::MASK, &mask.to_be_bytes());
    options.add(option::ROUTER, &config.gateway.octets());
    options.add(option::DNS, &config.dns.octets());
    options.add(option::BROADCAST, &broadcast.octets());
    if let Some(mtu) = config.mtu {
        options.add(option::MTU, &mtu.to_be_bytes());
    }
    options.add(option::HOST, config.host.as_bytes());
    if let Some(domain) = config.search.first() {
        options.add(option::DOMAIN, domain.as_bytes());
    }
    let mut list = Vec::new();
    let labels = |domain: &String| dns::labels(domain.trim_end_matches('.'));
    for domain in config.search.iter().filter_map(labels) {
        if options.fits(list.len() + domain.len()) {
            list.extend(domain);
        }
    }
    options.add(option::SEARCH, &list);
}

/// A message to which options are added, up to the guest's maximum size.
struct Options {
    message: Vec<u8>,
    max_size: usize,
}

impl Options {
    /// Whether an option with a value of this length fits, and the end after it.
    fn fits(&self, length: usize) -> bool {
        let headers = 2 * length.div_ceil(255).max(1);
        self.message.len() + headers + length < self.max_size
    }

    /// Adds an option, unless its value is empty or does not fit. Long values are split (RFC 3396).
    fn add(&mut self, code: u8, value: &[u8]) {
        if value.is_empty() || !self.fits(value.len()) {
            return;
        }
        for part in value.chunks(255) {
            let length = u8::try_from(part.len()).expect("a part has at most 255 bytes");
            self.message.extend([code, length]);
            self.message.extend(part);
        }
    }

    fn end(mut self) -> Vec<u8> {
        self.message.push(option::END);
        let length = self.message.len().max(MIN_MESSAGE);
        self.message.resize(length, 0);
        self.message
    }
}

#[cfg(test)]
mod test {
    use super::*;

    const MAC: Mac = Mac([2, 1, 2, 3, 4, 5]);

    fn config() -> Config {
        Config {
            mac: MAC,
            address: Ipv4Addr::new(172, 30, 4, 2),
            mask: 24,
            gateway: Ipv4Addr::new(172, 30, 4, 1),
            dns: Ipv4Addr::new(172, 30, 4, 1),
            host: "Windows".into(),
            search: vec!["win.svc.cluster.local".into(), "svc.cluster.local".into()],
            mtu: Some(1450),
        }
    }

    /// A request with these options.
    fn message(current: [u8; 4], options: &[(u8, &[u8])]) -> Vec<u8> {
        let mut message = vec![0; HEADER];
        message[..3].copy_from_slice(&[1, 1, 6]);
        message[4..8].copy_from_slice(b"abcd");
        message[12..16].copy_from_slice(&current);
        message[28..34].copy_from_slice(&MAC.0);
        message.extend(COOKIE);
        for (code, value) in options {
            message.extend([*code, u8::try_from(value.len()).unwrap()]);
            message.extend(*value);
        }
        message.push(option::END);
        message
    }

    /// The value of an option in a response, with all its parts joined.
    fn find(answer: &[u8], wanted: u8) -> Option<Vec<u8>> {
        let mut field = &answer[HEADER + COOKIE.len()..];
        let mut value = None;
        while let [code, length, rest @ ..] = field {
            if *code == option::END {
                break;
            }
            let (part, rest) = rest.split_at(usize::from(*length));
            if *code == wanted {
                value.get_or_insert_with(Vec::new).extend(part);
            }
            field = rest;
        }
        value
    }

    fn kind(answer: &Option<Answer>) -> Option<u8> {
        find(&answer.as_ref()?.payload, option::KIND).map(|kind| kind[0])
    }

    #[test]
    fn offers_the_address_with_all_options() {
        let asked = message([0; 4], &[(option::KIND, &[DISCOVER]), (option::CLIENT, b"me")]);
        let answer = answer(&config(), &asked).unwrap();
        assert_eq!(answer.to, Ipv4Addr::BROADCAST);
        let payload = &answer.payload;
        assert!(payload.len() >= MIN_MESSAGE);
        assert_eq!((&payload[..3], &payload[4..8]), (&[2, 1, 6][..], &b"abcd"[..]));
        assert_eq!(payload[16..20], [172, 30, 4, 2]);
        let told = |code| find(payload, code).unwrap();
        assert_eq!(told(option::KIND), [OFFER]);
        assert_eq!(told(option::CLIENT), b"me");
        assert_eq!(told(option::LEASE), 3600_u32.to_be_bytes());
        assert_eq!(told(option::RENEW), 1800_u32.to_be_bytes());
        assert_eq!(told(option::REBIND), 3150_u32.to_be_bytes());
        assert_eq!(told(option::MASK), [255, 255, 255, 0]);
        assert_eq!(told(option::BROADCAST), [172, 30, 4, 255]);
        assert_eq!((told(option::ROUTER), told(option::DNS)), (vec![172, 30, 4, 1], told(3)));
        assert_eq!(told(option::MTU), 1450_u16.to_be_bytes());
        assert_eq!(told(option::HOST), b"Windows");
        assert_eq!(told(option::DOMAIN), b"win.svc.cluster.local");
        let list = b"\x03win\x03svc\x07cluster\x05local\0\x03svc\x07cluster\x05local\0";
        assert_eq!(told(option::SEARCH), list);
    }

    #[test]
    fn acknowledges_its_address_and_refuses_others() {
        let request = |current: [u8; 4], more: &[(u8, &[u8])]| {
            let options = [&[(option::KIND, &[REQUEST][..])], more].concat();
            answer(&config(), &message(current, &options))
        };
        let (ours, other) = ([172, 30, 4, 2], [192, 168, 1, 7]);
        let wants = |address: &'static [u8; 4]| (option::ADDRESS, &address[..]);
        let server: (u8, &[u8]) = (option::SERVER, &[172, 30, 4, 1]);
        let selected = request([0; 4], &[wants(&[172, 30, 4, 2]), server]);
        assert_eq!(kind(&selected), Some(ACK));
        assert_eq!(selected.unwrap().to, Ipv4Addr::BROADCAST);
        assert_eq!(kind(&request([0; 4], &[wants(&[172, 30, 4, 2])])), Some(ACK), "it rebooted");
        let refused = request([0; 4], &[wants(&[192, 168, 1, 7])]);
        assert_eq!(kind(&refused), Some(NAK), "it was in another network");
        assert_eq!(find(&refused.unwrap().payload, option::LEASE), None);
        let renewed = request(ours, &[]).unwrap();
        assert_eq!(renewed.to, Ipv4Addr::from(ours), "it has its address");
        assert_eq!(kind(&request(other, &[])), Some(NAK));
        let elsewhere: (u8, &[u8]) = (option::SERVER, &[172, 30, 4, 9]);
        assert_eq!(request([0; 4], &[wants(&[172, 30, 4, 2]), elsewhere]), None);
        assert_eq!(request([0; 4], &[]), None);
    }

    #[test]
    fn an_inform_is_answered_without_a_lease() {
        let asked = |current| answer(&config(), &message(current, &[(option::KIND, &[INFORM])]));
        let told = asked([172, 30, 4, 2]).unwrap();
        assert_eq!(find(&told.payload, option::LEASE), None);
        assert_eq!(find(&told.payload, option::DNS), Some(vec![172, 30, 4, 1]));
        assert_eq!(told.payload[16..20], [0; 4]);
        assert_eq!(asked([8, 8, 8, 8]), None);
    }

    #[test]
    fn ignores_messages_that_are_not_for_it() {
        let good = message([0; 4], &[(option::KIND, &[DISCOVER])]);
        let with = |at: usize, byte: u8| {
            let mut bad = good.clone();
            bad[at] = byte;
            answer(&config(), &bad)
        };
        assert!(answer(&config(), &good).is_some());
        assert_eq!(with(33, 6), None, "another card");
        assert_eq!(with(0, 2), None, "another server");
        assert_eq!(with(2, 16), None, "no Ethernet");
        assert_eq!(with(24, 10), None, "through a relay");
        assert_eq!(with(236, 0), None, "no cookie");
        for kind in [DECLINE, 7, 0, 255] {
            assert_eq!(answer(&config(), &message([0; 4], &[(option::KIND, &[kind])])), None);
        }
        assert_eq!(answer(&config(), &message([0; 4], &[])), None, "BOOTP");
        assert_eq!(answer(&config(), &good[..good.len() - 3]), None, "cut in an option");
    }

    #[test]
    fn options_are_read_from_overloaded_fields() {
        let mut asked = message([0; 4], &[(option::OVERLOAD, &[1])]);
        asked[108..112].copy_from_slice(&[option::KIND, 1, DISCOVER, option::END]);
        assert_eq!(kind(&answer(&config(), &asked)), Some(OFFER));
    }

    #[test]
    fn an_answer_fits_the_guests_maximum_message_size() {
        let search = (0..40).map(|number| format!("{number}.a.rather.long.domain.example"));
        let config = Config { search: search.collect(), ..config() };
        let length = |size: u16| {
            let options =
                [(option::KIND, &[DISCOVER][..]), (option::MAX_SIZE, &size.to_be_bytes())];
            let told = answer(&config, &message([0; 4], &options)).unwrap();
            let list = find(&told.payload, option::SEARCH).unwrap_or_default();
            assert_eq!(list.last(), Some(&0), "whole names only");
            told.payload.len()
        };
        assert!(length(0) <= 548);
        assert!((900..=1472).contains(&length(1500)));
        assert!(length(65535) <= 1472);
    }
}
