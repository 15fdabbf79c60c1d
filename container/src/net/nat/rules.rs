//! The rules of the pod's packets, as nft(8) reads them: one table of our own, made in one
//! transaction in place of what a killed predecessor left, and removed in one.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::{env, thread};

use anyhow::{Context, bail};
use host::mac::Mac;
use jail::watch::{self, Rights};

use super::choice::{Kept, OLD_GATEWAY, Subnet};
use super::six::{MASK, Prefix};
use crate::settings::value::Value as _;
use crate::status::{Failure, Status};

/// What the rules are about.
pub(super) struct Rules<'a> {
    pub(super) tap: &'a str,
    pub(super) mac: Mac,
    pub(super) subnet: Subnet,
    /// Its network of IPv6, if it has one.
    pub(super) prefix: Option<Prefix>,
    pub(super) kept: &'a Kept,
}

/// What neighbours say to each other, and what they ask a router.
const NEIGHBOURS: &str = "{ nd-router-solicit, nd-neighbor-solicit, nd-neighbor-advert }";
/// Makes the table new: there is none, or that of a predecessor.
pub(super) const REPLACE: &str = "table inet transom\ndelete table inet transom\n";

impl Rules<'_> {
    /// What `nft` is told.
    pub(super) fn text(&self) -> String {
        let parts = [self.guard(), self.translation(), self.limits(), self.six()];
        format!("{REPLACE}table inet transom {{\n{}}}\n", parts.concat())
    }

    /// Who is what it says it is, before anything else. Outside nobody is the guest or the gateway;
    /// the guest has one card and one address, and IPv6 only where `six` guards it.
    fn guard(&self) -> String {
        let Subnet { guest, gateway, .. } = self.subnet;
        let (tap, mac) = (self.tap, self.mac.show());
        let version = match self.prefix {
            Some(_) => "meta nfproto ipv6 accept\n",
            None => "meta nfproto != ipv4 drop\n",
        };
        format!(
            "chain guard {{
type filter hook prerouting priority raw; policy accept;
iifname != {{ \"{tap}\", \"lo\" }} ip saddr {guest} drop
iifname != {{ \"{tap}\", \"lo\" }} ip daddr {{ {gateway}, {OLD_GATEWAY} }} drop
iifname != \"{tap}\" accept
ether saddr != {mac} drop
{version}ip saddr 0.0.0.0 udp dport 67 accept
ip saddr != {guest} drop
ip daddr 127.0.0.0/8 drop
}}
"
        )
    }

    /// What arrives at the pod, from outside, from the guest or from within, goes to the guest.
    fn translation(&self) -> String {
        let Subnet { guest, gateway, .. } = self.subnet;
        let to_guest = to_guest(guest, self.kept);
        format!(
            "chain arrive {{
type nat hook prerouting priority dstnat; policy accept;
ip daddr {{ {gateway}, {OLD_GATEWAY} }} return
fib daddr type local goto guest
}}
chain turn {{
type nat hook output priority -100; policy accept;
ip daddr {{ {gateway}, {OLD_GATEWAY} }} return
ip daddr 127.0.0.0/8 return
fib daddr type local goto guest
}}
chain guest {{
{to_guest}}}
chain leave {{
type nat hook postrouting priority srcnat; policy accept;
oifname != \"lo\" ip saddr {guest} masquerade
}}
"
        )
    }

    /// The same for IPv6, where the guest chooses its address itself in a network of its own. None
    /// of its ports are there: what the pod passes on to it goes by IPv4.
    fn six(&self) -> String {
        let Some(prefix) = self.prefix else { return String::new() };
        let (tap, network) = (self.tap, format!("{}/{MASK}", prefix.0));
        format!(
            "chain guard_six {{
type filter hook prerouting priority raw - 1; policy accept;
meta nfproto != ipv6 accept
iifname != {{ \"{tap}\", \"lo\" }} ip6 saddr {network} drop
iifname != {{ \"{tap}\", \"lo\" }} ip6 daddr {network} drop
iifname != \"{tap}\" accept
ip6 saddr {{ ::, fe80::/10 }} icmpv6 type {NEIGHBOURS} accept
ip6 saddr != {network} drop
ip6 daddr ::1 drop
}}
chain leave_six {{
type nat hook postrouting priority srcnat; policy accept;
oifname != {{ \"{tap}\", \"lo\" }} ip6 saddr {network} masquerade
}}
"
        )
    }

    /// Packets that fit, nobody who was not sent by us, and of the pod itself only what a guest
    /// needs: addresses, names, and an echo.
    fn limits(&self) -> String {
        let (tap, gateway) = (self.tap, self.subnet.gateway);
        let six = match self.prefix {
            Some(_) => {
                format!("icmpv6 type {NEIGHBOURS} accept\nicmpv6 type echo-request accept\n")
            }
            None => String::new(),
        };
        format!(
            "chain fit {{
type filter hook forward priority mangle; policy accept;
iifname \"{tap}\" tcp flags syn tcp option maxseg size set rt mtu
oifname \"{tap}\" tcp flags syn tcp option maxseg size set rt mtu
}}
chain through {{
type filter hook forward priority filter; policy accept;
oifname != \"{tap}\" accept
ct status dnat accept
ct state new drop
}}
chain inside {{
type filter hook input priority filter; policy accept;
iifname != \"{tap}\" accept
ct state established,related accept
udp dport 67 accept
ip daddr {gateway} udp dport 53 accept
ip daddr {gateway} tcp dport 53 accept
icmp type echo-request accept
{six}reject
}}
"
        )
    }
}

/// Sends all ports to the guest but those that are kept.
fn to_guest(guest: Ipv4Addr, kept: &Kept) -> String {
    let mut text = String::new();
    for (protocol, ports) in [("tcp", &kept.tcp), ("udp", &kept.udp)] {
        let but = match list(ports) {
            None => format!("meta l4proto {protocol}"),
            Some(ports) => format!("{protocol} dport != {{ {ports} }}"),
        };
        writeln!(text, "meta nfproto ipv4 {but} dnat ip to {guest}").expect("a string takes all");
    }
    text
}

fn list(ports: &BTreeSet<u16>) -> Option<String> {
    let ports: Vec<_> = ports.iter().map(u16::to_string).collect();
    (!ports.is_empty()).then(|| ports.join(", "))
}

/// Who takes the table away, however we end: a program that has heard what to do, and does it when
/// its input ends. So we need no right for it, and a pod that is killed leaves no rules behind.
pub(super) struct Table(Option<Child>);

impl Table {
    /// Starts it. It keeps the socket that says whose the network is until it is done.
    pub(super) fn watch(owner: &UnixListener) -> anyhow::Result<Self> {
        let owner = OwnedFd::from(owner.try_clone().context("the socket of the owner")?);
        let start = move || {
            watch::keep_for_programs(Rights::NET_ADMIN)?;
            // A terminal's Ctrl-C is not for it.
            let mut nft = nft();
            nft.stdout(owner).process_group(0).spawn().map_err(not_started)
        };
        let started = thread::Builder::new().name("rules".into()).spawn(start)?.join();
        let mut child = started.map_err(|_| anyhow::anyhow!("a thread for nft"))??;
        let input = child.stdin.as_mut().context("the input of nft")?;
        input.write_all(REPLACE.as_bytes()).context("the input of nft")?;
        Ok(Self(Some(child)))
    }

    /// Lets it do it.
    pub(super) fn remove(mut self) -> anyhow::Result<()> {
        self.0.take().map_or(Ok(()), finish)
    }
}

impl Drop for Table {
    /// The same for a network that was not finished: why is told already.
    fn drop(&mut self) {
        if let Some(Err(error)) = self.0.take().map(finish) {
            tracing::debug!("{error:#}");
        }
    }
}

/// Does what the text says, or nothing.
pub(super) fn apply(text: &str) -> anyhow::Result<()> {
    let mut child = nft().spawn().map_err(not_started)?;
    let input = child.stdin.as_mut().context("the input of nft")?;
    // What it says is better than that it does not listen.
    input.write_all(text.as_bytes()).ok();
    finish(child)
}

fn nft() -> Command {
    let mut nft = Command::new("nft");
    nft.args(["-f", "-"]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    // What the environment says is for us, passwords included.
    nft.env_clear().envs(env::var_os("PATH").map(|path| ("PATH", path)));
    nft
}

fn not_started(error: io::Error) -> anyhow::Error {
    match error.kind() {
        io::ErrorKind::NotFound => Failure::new(
            Status::Network,
            "there is no program `nft`: install nftables, or say NETWORK=user",
        ),
        _ => anyhow::Error::new(error).context("nft"),
    }
}

/// Ends its input, and hears how it went.
fn finish(child: Child) -> anyhow::Result<()> {
    let ended = child.wait_with_output().context("nft")?;
    if ended.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&ended.stderr);
    let said = said.lines().next().unwrap_or("nothing").trim();
    if said.contains("Operation not permitted") {
        bail!("nftables: {said}: add --cap-add NET_ADMIN, or say NETWORK=user");
    }
    bail!("nftables refuses the rules: {said}: the host needs nft_nat, nft_masq and nft_fib")
}

#[cfg(test)]
mod test {
    use std::path::Path;

    use super::*;

    #[test]
    fn who_takes_the_table_away_is_waited_for_however_that_comes() {
        for end in [|table: Table| drop(table), |table: Table| table.remove().unwrap()] {
            // It ends when its input does, too.
            let mut program = Command::new("cat");
            program.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
            let child = program.spawn().unwrap();
            let place = format!("/proc/{}", child.id());
            end(Table(Some(child)));
            assert!(!Path::new(&place).exists(), "{place} is left");
        }
    }
}
