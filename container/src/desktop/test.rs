//! Hostile browsers and guests, and certificates that change. Real servers: the suite
//! `remote_desktop`.

use std::fs;
use std::net::Ipv4Addr;

use ironrdp_rdcleanpath::RDCleanPathMessage;
use tokio::io::{DuplexStream, duplex};
use tokio::net::TcpListener;
use tokio_rustls::rustls::pki_types::CertificateDer;

use super::certificate::Accepted;
use super::*;

/// The first packet of a client that allows TLS and CredSSP.
const REQUEST: [u8; 19] = [3, 0, 0, 19, 14, 0xe0, 0, 0, 0, 0, 0, 1, 0, 8, 0, 3, 0, 0, 0];
/// The answer of Windows' own service: a confirm that selects TLS.
const CONFIRM: [u8; 19] = [3, 0, 0, 19, 14, 0xd0, 0, 0, 0x12, 0x34, 0, 2, 0, 8, 0, 2, 0, 0, 0];
/// An answer that refuses TLS (`SSL_NOT_ALLOWED_BY_SERVER`), and one of a server that knows none.
const REFUSED: [u8; 19] = [3, 0, 0, 19, 14, 0xd0, 0, 0, 0x12, 0x34, 0, 3, 0, 8, 0, 2, 0, 0, 0];
const OLD: [u8; 11] = [3, 0, 0, 11, 6, 0xd0, 0, 0, 0x12, 0x34, 0];

fn request(packet: &[u8], name: &str) -> Vec<u8> {
    let request =
        RDCleanPathPdu::new_request(packet.to_vec(), name.into(), "token".into(), None).unwrap();
    request.to_der().unwrap()
}

/// A guest at this address, which answers the first packet with these bytes.
async fn guest(last: u8, answer: &'static [u8]) -> Arc<OnceLock<GuestAddress>> {
    let address = Ipv4Addr::new(127, 0, 7, last);
    let listener = TcpListener::bind((address, RDP)).await.unwrap();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut heard = [0; REQUEST.len()];
            stream.read_exact(&mut heard).await.unwrap();
            assert_eq!(heard, REQUEST);
            stream.write_all(answer).await.unwrap();
            // The connection stays open.
            tokio::spawn(
                async move { while stream.read(&mut heard).await.is_ok_and(|it| it > 0) {} },
            );
        }
    });
    Arc::new(OnceLock::from(GuestAddress::Fixed(address.into())))
}

/// Opens a desktop, sends these bytes, and returns the gateway's answer.
async fn answer(
    gateway: &Arc<Gateway>,
    bytes: &[u8],
    view_only: bool,
) -> (Option<RDCleanPathMessage>, DuplexStream) {
    let (mut ours, theirs) = duplex(1 << 16);
    let viewer = Viewer { stream: Box::new(theirs), peer: "10.0.0.9".into(), view_only };
    tokio::spawn(gateway.clone().serve(viewer));
    ours.write_all(bytes).await.unwrap();
    let mut said = vec![0; 4096];
    let count = ours.read(&mut said).await.unwrap();
    let pdu = RDCleanPathPdu::from_der(&said[..count]).ok();
    (pdu.and_then(|pdu| pdu.try_into().ok()), ours)
}

/// The status of a refusal.
async fn status(gateway: &Arc<Gateway>, bytes: &[u8]) -> u16 {
    match answer(gateway, bytes, false).await.0 {
        Some(RDCleanPathMessage::GeneralErr(error)) => error.http_status_code.unwrap(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn invalid_requests_reach_no_guest() {
    // Nothing listens there.
    let nobody = GuestAddress::Fixed(Ipv4Addr::new(127, 0, 7, 1).into());
    let gateway = Arc::new(Gateway::new(Arc::new(OnceLock::from(nobody))));
    let long = request(&REQUEST, &"a".repeat(5000));
    let trailing = [request(&REQUEST, "machine"), vec![0]].concat();
    let huge = [0x30, 0x84, 0xff, 0xff, 0xff, 0xff, 0xa0, 4, 2, 2, 0x0d, 0x3e];
    let no_request = request(&CONFIRM, "machine");
    let short = request(&REQUEST[..18], "machine");
    let longer = request(&[&REQUEST[..], &[0]].concat(), "machine");
    for bytes in
        [b"GET / HTTP/1.1\r\n\r\n", &huge[..], &long, &trailing, &no_request, &short, &longer]
    {
        assert_eq!(status(&gateway, bytes).await, 400, "{bytes:?}");
    }
    // A valid one is for the guest, whatever name it has.
    assert_eq!(status(&gateway, &request(&REQUEST, "8.8.8.8:22")).await, 502);
    let refusal = answer(&gateway, &request(&REQUEST, "machine"), true).await.0;
    assert!(
        matches!(&refusal, Some(RDCleanPathMessage::GeneralErr(it))
            if it.http_status_code == Some(403)),
        "{refusal:?}"
    );
    let none = Arc::new(Gateway::new(Arc::default()));
    assert_eq!(status(&none, &request(&REQUEST, "machine")).await, 502);
}

#[tokio::test]
async fn a_guest_without_tls_is_refused() {
    for (last, packet) in [(2, &REFUSED[..]), (3, &OLD)] {
        let gateway = Arc::new(Gateway::new(guest(last, packet).await));
        let said = answer(&gateway, &request(&REQUEST, "machine"), false).await.0;
        let Some(RDCleanPathMessage::NegotiationErr { x224_connection_response }) = said else {
            panic!("{said:?}")
        };
        assert_eq!(x224_connection_response, packet);
    }
    for (last, bytes) in [(4, &b"SSH-2.0-OpenSSH_9.2\r\n"[..]), (5, &[3, 0, 0xff, 0xff, 0])] {
        let gateway = Arc::new(Gateway::new(guest(last, bytes).await));
        assert_eq!(status(&gateway, &request(&REQUEST, "machine")).await, 501);
    }
    // Its answer promises TLS, but no handshake follows.
    let gateway = Arc::new(Gateway::new(guest(6, &CONFIRM).await));
    let (mut ours, theirs) = duplex(1 << 16);
    let viewer = Viewer { stream: Box::new(theirs), peer: "10.0.0.9".into(), view_only: false };
    tokio::spawn(gateway.clone().serve(viewer));
    ours.write_all(&request(&REQUEST, "machine")).await.unwrap();
    let mut said = [0; 64];
    let silent = timeout(Duration::from_millis(300), ours.read(&mut said)).await;
    assert!(silent.is_err());
    // Nobody is connected before the guest has answered.
    assert!(gateway.connected().is_empty());
}

#[tokio::test]
async fn only_an_answer_of_rdp_counts() {
    for (last, says, is) in [(7, &CONFIRM[..], true), (8, b"SSH-2.0-OpenSSH_9.2\r\n", false)] {
        let gateway = Gateway::new(guest(last, says).await);
        assert_eq!(gateway.check().await.is_ok(), is);
    }
    let gateway = Gateway::new(Arc::default());
    assert_eq!(gateway.check().await.unwrap_err(), "the guest has no network");
}

#[test]
fn desktops_are_limited() {
    let gateway = Gateway::new(Arc::default());
    let mut places: Vec<_> =
        (0..MAX_DESKTOPS).map(|_| gateway.take_place("10.0.0.9").unwrap()).collect();
    assert_eq!(gateway.connected().len(), MAX_DESKTOPS);
    assert!(gateway.take_place("10.0.0.8").is_none());
    places.pop();
    assert!(gateway.take_place("10.0.0.8").is_some());
    places.clear();
    assert!(gateway.connected().is_empty());
}

#[test]
fn another_certificate_needs_a_user() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("windows.rdp");
    let (first, second) = (CertificateDer::from(vec![1]), CertificateDer::from(vec![2]));
    let pin = Pin::default();
    pin.keep_in(file.clone());
    let accepts = |pin: &Pin, certificate, proves| pin.accepts(certificate, proves).is_some();
    // A server that does not prove that it knows the password must be trusted first.
    assert!(!accepts(&pin, &first, false) && !file.exists());
    assert_eq!(pin.changed().unwrap().kept, None);
    // A server that only offers a proof is forgotten.
    assert!(accepts(&pin, &second, true));
    let Some(Accepted::First(fingerprint)) = pin.accepts(&first, true) else {
        panic!("it is known")
    };
    assert!(!file.exists());
    pin.proven(fingerprint);
    pin.proven("other".into());
    assert_eq!(pin.accepts(&first, true), Some(Accepted::Known));
    // It offered a proof, and would now get the password without one.
    assert!(!accepts(&pin, &first, false));
    assert_eq!(pin.changed().unwrap().kept, None);
    assert!(accepts(&pin, &first, true) && !accepts(&pin, &second, true));
    let changed = pin.changed().unwrap();
    let kept = changed.kept.unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap().trim(), kept);
    // It is known after a start.
    let pin = Pin::default();
    pin.keep_in(file.clone());
    assert_eq!(pin.changed(), None);
    assert!(!accepts(&pin, &second, true));
    assert!(pin.trust(&kept).is_err() && pin.trust("").is_err());
    pin.trust(&changed.shown).unwrap();
    assert!(accepts(&pin, &second, true) && !accepts(&pin, &first, true));
    let pin = Pin::default();
    pin.keep_in(file.clone());
    assert!(accepts(&pin, &second, false), "a user trusts it, also after a start");
    // A link on the volume is neither read nor followed by a write.
    let (target, link) = (folder.path().join("target"), folder.path().join("link"));
    fs::write(&target, format!("{kept}\n")).unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    let pin = Pin::default();
    pin.keep_in(link);
    let Some(Accepted::First(fingerprint)) = pin.accepts(&second, true) else {
        panic!("it is known")
    };
    pin.proven(fingerprint);
    assert_eq!(fs::read_to_string(&target).unwrap().trim(), kept);
}

/// An info packet with these flags, whose data has a long or a short length.
fn info(flags: u32, long: bool) -> Vec<u8> {
    let data = [&[0x40, 0, 0, 0, 0, 0, 0, 0][..], &flags.to_le_bytes(), &[0xaa; 20]].concat();
    let count = u8::try_from(data.len()).unwrap();
    let length = if long { vec![0x80, count] } else { vec![count] };
    let head = [2, 0xf0, 0x80, 0x64, 0, 7, 3, 0xeb, 0x70];
    let total = u8::try_from(4 + head.len() + length.len() + data.len()).unwrap();
    [&[3, 0, 0, total][..], &head, &length, &data].concat()
}

#[test]
fn the_info_packet_asks_for_sound_at_the_machine_and_for_a_sign_in() {
    const NO_SOUND: u32 = 0x8_0000;
    let credssp = [&[0x30, 0x82, 1, 0][..], &[0x64; 256]].concat();
    let short = [0x30, 3, 1, 2, 3];
    let join = [3, 0, 0, 12, 2, 0xf0, 0x80, 0x38, 0, 7, 3, 0xeb];
    // It is looked for no more after it.
    let after = info(NO_SOUND, false);
    for long in [false, true] {
        let before = [&credssp[..], &short, &join].concat();
        let sent = [&before[..], &info(NO_SOUND | 0x1_0033, long), &after].concat();
        let wanted = [&before[..], &info(0x1_203b, long), &after].concat();
        for piece in [1, 2, 3, 7, 100, 1000] {
            let mut passed = sent.clone();
            let mut filter = InfoFilter::default();
            let (proof, rest) = passed.split_at_mut(credssp.len() + short.len());
            proof.chunks_mut(piece).for_each(|bytes| filter.pass(bytes));
            assert!(!filter.proven);
            rest.chunks_mut(piece).for_each(|bytes| filter.pass(bytes));
            assert!(filter.proven);
            assert_eq!(passed, wanted, "pieces of {piece}");
        }
    }
}

#[test]
fn bytes_that_are_no_frames_pass_unchanged() {
    let packet = info(0, false);
    for start in [&[0, 1][..], &[3, 0, 0, 2], &[0x30, 0x83, 0, 0], &[3, 0, 0xff, 0xff]] {
        let sent = [start, &packet].concat();
        let mut passed = sent.clone();
        let mut filter = InfoFilter::default();
        filter.pass(&mut passed);
        assert_eq!(passed, sent);
        assert!(!filter.proven);
    }
}
