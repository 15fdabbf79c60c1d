//! The start of a connection: RDCleanPath with the browser; X.224 (MS-RDPBCGR 2.2.1.1) and TLS with
//! the guest.

use std::fmt::{self, Display, Formatter};
use std::io;
use std::time::Duration;

use ironrdp_rdcleanpath::{DetectionResult, RDCleanPathMessage, RDCleanPathPdu};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::ServerName;

use super::RDP;
use super::certificate::{Accepted, Pin, connector};
use crate::pod::network::GuestAddress;

/// Maximum bytes of a request of a browser. It has a name, a token and the first packet.
const MAX_REQUEST_BYTES: usize = 4096;
/// The first byte of a request, in DER.
const SEQUENCE: u8 = 0x30;
/// Bytes of the header of a packet (RFC 1006).
const HEADER_BYTES: usize = 4;
/// Maximum bytes of the first packets, which have a name or a cookie at most.
const MAX_PACKET_BYTES: usize = 512;
const PACKET_VERSION: u8 = 3;
/// Codes of X.224, in the upper four bits.
const REQUEST: u8 = 0xe0;
const CONFIRM: u8 = 0xd0;
/// `RDP_NEG_RSP`: the server chose a protocol.
const CHOSEN: u8 = 2;
/// The protocol without TLS (`PROTOCOL_RDP`).
const WITHOUT_TLS: u32 = 0;
/// `PROTOCOL_HYBRID` and `PROTOCOL_HYBRID_EX`
const WITH_CREDSSP: [u32; 2] = [2, 8];
/// Timeout of a question whether the guest has a remote desktop.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// A request that allows TLS and CredSSP.
const QUESTION: [u8; 19] = [3, 0, 0, 19, 14, REQUEST, 0, 0, 0, 0, 0, 1, 0, 8, 0, 3, 0, 0, 0];

/// Why the gateway does not connect. The client of the page knows statuses of HTTP.
#[derive(Debug)]
pub(super) enum Refusal {
    Invalid(&'static str),
    ViewOnly,
    NoNetwork,
    Unreachable(anyhow::Error),
    /// The guest's answer, which says why.
    NoTls(Vec<u8>),
    NotRdp,
    Full,
    Tls(io::Error),
    OtherCertificate,
    TimedOut,
}

impl Refusal {
    pub(super) fn answer(&self) -> RDCleanPathPdu {
        let status = match self {
            Self::Invalid(_) => 400,
            Self::ViewOnly => 403,
            Self::OtherCertificate => 409,
            Self::NoNetwork | Self::Unreachable(_) => 502,
            Self::NotRdp => 501,
            Self::Full => 503,
            Self::TimedOut => 504,
            // The number that proxies use for a failed handshake.
            Self::Tls(_) => 525,
            Self::NoTls(packet) => {
                let answer = RDCleanPathPdu::new_negotiation_error(packet.clone());
                return answer.unwrap_or_else(|_| RDCleanPathPdu::new_http_error(501));
            }
        };
        RDCleanPathPdu::new_http_error(status)
    }
}

impl Display for Refusal {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Invalid(why) => write!(f, "an invalid request: {why}"),
            Self::ViewOnly => f.write_str("view-only access"),
            Self::NoNetwork => f.write_str("the guest has no network"),
            Self::Unreachable(error) => write!(f, "port {RDP} of the guest: {error:#}"),
            Self::NoTls(_) => f.write_str("the remote desktop has no TLS"),
            Self::NotRdp => write!(f, "port {RDP} of the guest does not speak RDP"),
            Self::Full => f.write_str("too many desktops are open"),
            Self::Tls(error) => write!(f, "TLS with the remote desktop: {error}"),
            Self::OtherCertificate => {
                f.write_str("the remote desktop has another certificate than before")
            }
            Self::TimedOut => f.write_str("the remote desktop did not answer in time"),
        }
    }
}

/// The first packet of the browser's client. The rest of its request does not count: the gateway
/// decides where it connects.
pub(super) async fn read_request(
    stream: &mut (impl AsyncRead + Unpin),
) -> Result<Vec<u8>, Refusal> {
    let mut bytes = Vec::new();
    let length = loop {
        match RDCleanPathPdu::detect(&bytes) {
            DetectionResult::Detected { total_length, .. } => break total_length,
            DetectionResult::NotEnoughBytes => {}
            DetectionResult::Failed => return Err(Refusal::Invalid("not RDCleanPath")),
        }
        read_more(stream, &mut bytes).await?;
        // The library waits for more of bytes that are no DER.
        if bytes.first() != Some(&SEQUENCE) {
            return Err(Refusal::Invalid("not RDCleanPath"));
        }
    };
    if length > MAX_REQUEST_BYTES {
        return Err(Refusal::Invalid("it is too long"));
    }
    while bytes.len() < length {
        read_more(stream, &mut bytes).await?;
    }
    if bytes.len() > length {
        return Err(Refusal::Invalid("bytes follow it"));
    }
    let message = RDCleanPathPdu::from_der(&bytes).ok();
    match message.and_then(|it| RDCleanPathMessage::try_from(it).ok()) {
        Some(RDCleanPathMessage::Request { x224_connection_request, .. }) => {
            let packet = x224_connection_request.as_bytes();
            match is_packet(packet, REQUEST) {
                true => Ok(packet.to_vec()),
                false => Err(Refusal::Invalid("its packet is no request for a connection")),
            }
        }
        _ => Err(Refusal::Invalid("it has no packet")),
    }
}

async fn read_more(
    stream: &mut (impl AsyncRead + Unpin),
    bytes: &mut Vec<u8>,
) -> Result<(), Refusal> {
    let mut piece = [0; 1024];
    if bytes.len() > MAX_REQUEST_BYTES {
        return Err(Refusal::Invalid("it is too long"));
    }
    match stream.read(&mut piece).await {
        Ok(count @ 1..) => {
            bytes.extend(&piece[..count]);
            Ok(())
        }
        _ => Err(Refusal::Invalid("it is incomplete")),
    }
}

/// Whether these bytes are one packet with this code.
fn is_packet(bytes: &[u8], code: u8) -> bool {
    let [PACKET_VERSION, _, high, low, _, found, ..] = bytes else { return false };
    let length = usize::from(u16::from_be_bytes([*high, *low]));
    length == bytes.len() && length <= MAX_PACKET_BYTES && found & 0xf0 == code
}

/// Connects to the guest, and returns the answer to the browser, and how its certificate is
/// accepted.
pub(super) async fn connect(
    guest: &GuestAddress,
    request: &[u8],
    pin: &Pin,
) -> Result<(RDCleanPathPdu, TlsStream<TcpStream>, Accepted), Refusal> {
    let mut stream = guest.connect(RDP).await.map_err(Refusal::Unreachable)?;
    let address = stream.peer_addr().map_err(|error| Refusal::Unreachable(error.into()))?.ip();
    let packet = exchange(&mut stream, request).await?;
    let protocol = match chosen(&packet) {
        None | Some(WITHOUT_TLS) => return Err(Refusal::NoTls(packet)),
        Some(protocol) => protocol,
    };
    let connector = connector().map_err(|error| Refusal::Tls(io::Error::other(error)))?;
    let name = ServerName::IpAddress(address.into());
    let stream = connector.connect(name, stream).await.map_err(Refusal::Tls)?;
    let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
    let proves = WITH_CREDSSP.contains(&protocol);
    let accepted = chain.first().and_then(|certificate| pin.accepts(certificate, proves));
    let accepted = accepted.ok_or(Refusal::OtherCertificate)?;
    let chain: Vec<_> = chain.iter().map(|it| it.to_vec()).collect();
    let answer =
        RDCleanPathPdu::new_response(format!("{}:{RDP}", address.to_canonical()), packet, chain);
    let answer = answer.map_err(|error| Refusal::Tls(io::Error::other(error)))?;
    Ok((answer, stream, accepted))
}

/// Sends the first packet, and returns the answer to it.
async fn exchange(stream: &mut TcpStream, request: &[u8]) -> Result<Vec<u8>, Refusal> {
    let exchanged = async {
        stream.write_all(request).await?;
        let mut packet = vec![0; HEADER_BYTES];
        stream.read_exact(&mut packet).await?;
        let length = usize::from(u16::from_be_bytes([packet[2], packet[3]]));
        if packet[0] != PACKET_VERSION || !(HEADER_BYTES..=MAX_PACKET_BYTES).contains(&length) {
            return Ok(packet);
        }
        packet.resize(length, 0);
        stream.read_exact(&mut packet[HEADER_BYTES..]).await?;
        Ok::<_, io::Error>(packet)
    };
    let packet = exchanged.await.map_err(|error| Refusal::Unreachable(error.into()))?;
    if is_packet(&packet, CONFIRM) { Ok(packet) } else { Err(Refusal::NotRdp) }
}

/// The protocol that the server chose (MS-RDPBCGR 2.2.1.2.1).
fn chosen(packet: &[u8]) -> Option<u32> {
    let response: &[u8; 8] = packet.get(11..)?.first_chunk()?;
    let [CHOSEN, _, _, _, protocol @ ..] = response else { return None };
    Some(u32::from_le_bytes(*protocol))
}

/// Asks the guest for its remote desktop. An error is the reason why there is none.
pub async fn answers(guest: &GuestAddress) -> Result<(), String> {
    let asked = async {
        let mut stream = guest.connect(RDP).await.map_err(Refusal::Unreachable)?;
        exchange(&mut stream, &QUESTION).await
    };
    match timeout(ANSWER_TIMEOUT, asked).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(refusal)) => Err(refusal.to_string()),
        Err(_) => Err(format!("port {RDP} of the guest does not answer")),
    }
}
