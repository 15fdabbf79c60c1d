//! Handshake and authentication of clients (RFC 6143 7.1 to 7.3; VeNCrypt as in the community's
//! rfbproto).
//!
//! Threats: the peer is unknown. All messages have a fixed or bounded length, the whole handshake
//! takes a bounded time (`Server::serve`), and wrong passwords cause delays (`security`).

use anyhow::{Context, bail, ensure};
use rustix::rand::{GetRandomFlags, getrandom};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{Duration, timeout};

use super::security::{Access, Denied, LoginLimiter, PeerNetwork};
use super::{Admission, Duplex, Entry, Rules, Wire};

/// A client that was let in.
pub(super) struct Welcome {
    /// The connection, which may be TLS by now.
    pub stream: Wire,
    pub access: Access,
    pub shared: bool,
    /// Name of the authentication method, for logs and status.
    pub security: &'static str,
}

/// Protocol versions that behave differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Version {
    V3,
    V7,
    V8,
}

/// The first message of both sides.
pub(super) const GREETING: &[u8; 12] = b"RFB 003.008\n";
/// Security types.
pub(super) const NONE: u8 = 1;
const VNC: u8 = 2;
const VENCRYPT: u8 = 19;
/// The VeNCrypt types that we support: TLS with a certificate.
const X509_NONE: u32 = 260;
const X509_VNC: u32 = 261;
const X509_PLAIN: u32 = 262;
/// Authentication method of clients that were authenticated elsewhere.
const ELSEWHERE: &str = "checked before";
/// Maximum bytes of a name or a password.
const MAX_NAME: u32 = 1024;
/// Time limit for steps that need no person. A person then has more time to type a password.
const STEP_TIMEOUT: Duration = Duration::from_secs(20);
/// VNC clients wait for the server to speak first. A peer that sends anything within this time is
/// not one.
const SILENCE: Duration = Duration::from_millis(20);

/// Performs the whole handshake.
pub(super) async fn greet(
    rules: &Rules,
    limiter: &LoginLimiter,
    mut stream: Wire,
    admission: &Admission,
) -> anyhow::Result<Welcome> {
    let listens = matches!(
        admission.entry,
        Entry::Authenticate(PeerNetwork::Loopback | PeerNetwork::Remote(_))
    );
    let version = quick(versions(&mut stream, listens)).await?;
    let network = match admission.entry {
        Entry::Authenticated { view_only } => {
            quick(choose(&mut stream, version, NONE)).await?;
            let access = if view_only { Access::View } else { Access::Full };
            return finish(stream, version, access, ELSEWHERE).await;
        }
        Entry::Authenticate(network) => network,
    };
    if let Some(left) = limiter.locked_for(network) {
        let reason = too_many(left);
        refuse_early(&mut stream, version, &reason).await?;
        bail!(reason);
    }
    let needed = rules.passwords.are_needed();
    let kind = if rules.tls.is_some() { VENCRYPT } else { [NONE, VNC][usize::from(needed)] };
    quick(choose(&mut stream, version, kind)).await?;
    let authentication = Authentication { rules, limiter, network, version };
    match kind {
        NONE => finish(stream, version, Access::Full, "none").await,
        VNC => {
            let access = authentication.vnc(&mut stream).await?;
            finish(stream, version, access, "vnc").await
        }
        _ => authentication.vencrypt(stream).await,
    }
}

fn too_many(left: Duration) -> String {
    format!("too many wrong passwords: try again in {} s", left.as_secs() + 1)
}

async fn quick<T>(step: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    timeout(STEP_TIMEOUT, step).await.context("it did not reply in time")?
}

pub(super) async fn refuse(stream: &mut Wire, reason: &str) -> anyhow::Result<()> {
    let version = versions(stream, false).await?;
    refuse_early(stream, version, reason).await
}

async fn versions(stream: &mut Wire, listens: bool) -> anyhow::Result<Version> {
    let mut received = [0; 12];
    let mut count = 0;
    if listens && let Ok(read) = timeout(SILENCE, stream.read(&mut received)).await {
        count = read?;
        ensure!(count > 0, "it disconnected during the handshake");
        detect_other_protocol(stream, &received[..count]).await?;
    }
    stream.write_all(GREETING).await?;
    stream.flush().await?;
    while count < received.len() {
        let read = stream.read(&mut received[count..]).await?;
        ensure!(read > 0, "it disconnected during the handshake");
        count += read;
        detect_other_protocol(stream, &received[..count]).await?;
    }
    parse_version(&received)
}

fn parse_version(received: &[u8; 12]) -> anyhow::Result<Version> {
    let text = std::str::from_utf8(received).ok();
    let numbers = text.and_then(|text| text.strip_prefix("RFB ")?.strip_suffix('\n'));
    let numbers = numbers.and_then(|numbers| numbers.split_once('.'));
    let number = |text: &str| {
        let plain = text.len() == 3 && text.bytes().all(|byte| byte.is_ascii_digit());
        plain.then(|| text.parse::<u16>().ok()).flatten()
    };
    let version = numbers.and_then(|(major, minor)| Some((number(major)?, number(minor)?)));
    Ok(match version.with_context(|| format!("it sent `{}`", received.escape_ascii()))? {
        // Versions that never existed are treated as the first one.
        (0..=2, _) | (3, 0..=6) => Version::V3,
        (3, 7) => Version::V7,
        _ => Version::V8,
    })
}

async fn detect_other_protocol(stream: &mut Wire, received: &[u8]) -> anyhow::Result<()> {
    const METHODS: &[&[u8]] = &[b"GET ", b"HEAD", b"POST", b"PUT ", b"OPTI", b"CONN", b"PRI "];
    if METHODS.iter().any(|method| received.starts_with(method)) {
        let text = "This port speaks VNC (RFB), not HTTP: open it with a VNC viewer.\n";
        let answer = format!(
            "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: {}\r\n\
             Connection: close\r\n\r\n{text}",
            text.len()
        );
        stream.write_all(answer.as_bytes()).await?;
        stream.flush().await?;
        // Unread input would make the kernel discard our answer.
        let mut rest = [0; 4096];
        timeout(SILENCE, stream.read(&mut rest)).await.ok();
        stream.shutdown().await?;
        bail!("it speaks HTTP: this port is for VNC viewers");
    }
    if received.starts_with(&[0x16, 0x03]) {
        bail!(
            "it speaks TLS at once: VNC viewers start with RFB, and switch to TLS later (VeNCrypt)"
        );
    }
    Ok(())
}

/// Offers one security type, which the client must select.
async fn choose(stream: &mut Wire, version: Version, kind: u8) -> anyhow::Result<()> {
    if version == Version::V3 {
        if kind == VENCRYPT {
            let reason = "this screen needs a viewer with RFB 3.7 and TLS (VeNCrypt)";
            refuse_early(stream, version, reason).await?;
            bail!("its RFB 3.3 is too old for TLS");
        }
        stream.write_u32(kind.into()).await?;
        stream.flush().await?;
        return Ok(());
    }
    stream.write_all(&[1, kind]).await?;
    stream.flush().await?;
    let taken = stream.read_u8().await?;
    ensure!(taken == kind, "it selected security type {taken}: only {kind} is offered");
    Ok(())
}

/// Sends a refusal instead of the security types.
async fn refuse_early(stream: &mut Wire, version: Version, reason: &str) -> anyhow::Result<()> {
    if version == Version::V3 {
        stream.write_u32(0).await?;
    } else {
        stream.write_u8(0).await?;
    }
    send_text(stream, reason).await
}

/// Sends a text with its length.
async fn send_text<S: Duplex + ?Sized>(stream: &mut S, text: &str) -> anyhow::Result<()> {
    stream.write_u32(u32::try_from(text.len())?).await?;
    stream.write_all(text.as_bytes()).await?;
    stream.flush().await?;
    Ok(())
}

/// Sends the result of authentication, and reads `ClientInit`.
async fn finish(
    mut stream: Wire,
    version: Version,
    access: Access,
    security: &'static str,
) -> anyhow::Result<Welcome> {
    // Before 3.8 there is no result if there was no authentication.
    if version == Version::V8 || !matches!(security, "none" | ELSEWHERE) {
        stream.write_u32(0).await?;
        stream.flush().await?;
    }
    let shared = stream.read_u8().await? != 0;
    Ok(Welcome { stream, access, shared, security })
}

struct Authentication<'a> {
    rules: &'a Rules,
    limiter: &'a LoginLimiter,
    network: PeerNetwork,
    version: Version,
}

impl Authentication<'_> {
    /// VNC authentication: a challenge and a response.
    async fn vnc<S: Duplex + ?Sized>(&self, stream: &mut S) -> anyhow::Result<Access> {
        let mut challenge = [0; 16];
        let count = getrandom(&mut challenge, GetRandomFlags::empty())
            .context("cannot read random bytes")?;
        ensure!(count == challenge.len(), "cannot read random bytes");
        stream.write_all(&challenge).await?;
        stream.flush().await?;
        let mut answer = [0; 16];
        stream.read_exact(&mut answer).await?;
        self.check_password(stream, || self.rules.passwords.check_answer(&challenge, &answer)).await
    }

    /// Reads a name and a password, within TLS.
    async fn plain<S: Duplex + ?Sized>(&self, stream: &mut S) -> anyhow::Result<Access> {
        let (user, password) = (stream.read_u32().await?, stream.read_u32().await?);
        let longest = user.max(password);
        ensure!(longest <= MAX_NAME, "a name or password of {longest} bytes: at most {MAX_NAME}");
        let mut both = vec![0; user as usize + password as usize];
        stream.read_exact(&mut both).await?;
        let (user, password) = both.split_at(user as usize);
        self.check_password(stream, || self.rules.passwords.check_plain(user, password)).await
    }

    /// If the password is wrong, the client gets a refusal.
    async fn check_password<S: Duplex + ?Sized>(
        &self,
        stream: &mut S,
        verify: impl FnOnce() -> Option<Access>,
    ) -> anyhow::Result<Access> {
        let reason = match self.limiter.check(self.network, verify) {
            Ok(access) => return Ok(access),
            Err(Denied::Wrong(count)) => format!("wrong password, failure number {count}"),
            // Others may have guessed while this client waited.
            Err(Denied::Later(left)) => too_many(left),
        };
        stream.write_u32(1).await?;
        if self.version == Version::V8 {
            let short = reason.split_once(',').map_or(&*reason, |it| it.0);
            send_text(stream, short).await?;
        }
        stream.flush().await?;
        stream.shutdown().await?;
        bail!(reason);
    }

    async fn vencrypt(&self, mut stream: Wire) -> anyhow::Result<Welcome> {
        stream.write_all(&[0, 2]).await?;
        stream.flush().await?;
        let wanted = [stream.read_u8().await?, stream.read_u8().await?];
        stream.write_u8(u8::from(wanted != [0, 2])).await?;
        stream.flush().await?;
        ensure!(
            wanted == [0, 2],
            "it requested VeNCrypt {}.{}: only 0.2 is supported",
            wanted[0],
            wanted[1]
        );
        let offered = self.offered();
        stream.write_u8(u8::try_from(offered.len())?).await?;
        for kind in &offered {
            stream.write_u32(*kind).await?;
        }
        stream.flush().await?;
        let kind = stream.read_u32().await?;
        let known = offered.contains(&kind);
        stream.write_u8(known.into()).await?;
        stream.flush().await?;
        ensure!(known, "it selected VeNCrypt type {kind}: only {offered:?} are offered");
        let files = self.rules.tls.as_ref().context("TLS without a certificate")?;
        let mut secure = files.acceptor().accept(stream).await.context("TLS")?;
        let (access, security) = match kind {
            X509_VNC => (self.vnc(&mut secure).await?, "x509-vnc"),
            X509_PLAIN => (self.plain(&mut secure).await?, "x509-plain"),
            // All versions send a result here, as for the other types.
            _ => (Access::Full, "x509-none"),
        };
        finish(Box::new(secure), self.version, access, security).await
    }

    /// VNC authentication would ignore all names and the end of a long password, so it is not
    /// offered then.
    fn offered(&self) -> Vec<u32> {
        let passwords = &self.rules.passwords;
        match (passwords.are_needed(), passwords.are_long() || passwords.user.is_some()) {
            (false, _) => vec![X509_NONE],
            (true, true) => vec![X509_PLAIN],
            (true, false) => vec![X509_PLAIN, X509_VNC],
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn unknown_versions_map_to_the_nearest_known_one() {
        let version = |text: &[u8; 12]| parse_version(text).ok();
        assert_eq!(version(b"RFB 003.003\n"), Some(Version::V3));
        assert_eq!(version(b"RFB 003.005\n"), Some(Version::V3));
        assert_eq!(version(b"RFB 003.007\n"), Some(Version::V7));
        assert_eq!(version(b"RFB 003.008\n"), Some(Version::V8));
        assert_eq!(version(b"RFB 003.889\n"), Some(Version::V8));
        assert_eq!(version(b"RFB 005.000\n"), Some(Version::V8));
        for bad in
            [b"RFB 003.0+8\n", b"RFB 003,008\n", b"RFB 003.008\r", b"\0\0\0\0\0\0\0\0\0\0\0\0"]
        {
            assert_eq!(version(bad), None, "{}", bad.escape_ascii());
        }
    }
}
