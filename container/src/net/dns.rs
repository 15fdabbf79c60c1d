//! DNS messages (RFC 1035), as far as a relay needs them: questions, local names, the search list
//! of the pod, and the check that an answer belongs to a question.
//!
//! Threats: guest and resolvers send any bytes. Names of questions are read within the message and
//! cannot have pointers. Records of answers are left to the parser of a library. All lists are
//! bounded.

use std::net::{IpAddr, Ipv4Addr};

use simple_dns::rdata::{CNAME, RData};
use simple_dns::{CLASS, Name, Packet, ResourceRecord};

use super::hosts::Hosts;
use super::resolv::Resolv;

pub const PORT: u16 = 53;
/// The name of the pod itself.
pub const HOST_NAME: &str = "host.lan";
/// The name of the pod's default gateway: with Docker, the host.
const GATEWAY_NAME: &str = "system.lan";
/// The domain of the guest if the pod has no search domain. Windows does not ask DNS for names
/// without a domain.
pub const DOMAIN: &str = "lan";

/// Bytes of a header (RFC 1035, 4.1.1).
const HEADER: usize = 12;
const MAX_NAME: usize = 255;
/// The maximum size of a datagram without EDNS, in bytes.
const MAX_DATAGRAM: usize = 512;
/// The maximum number of addresses per name, which fit into such a datagram.
const MAX_ADDRESSES: usize = 8;
/// Time to live of our own answers, in seconds.
const TTL: u32 = 60;

// Bits of the second word of a header.
const RESPONSE: u16 = 0x8000;
const OPCODE: u16 = 0x7800;
const AUTHORITATIVE: u16 = 0x0400;
const TRUNCATED: u16 = 0x0200;
const WANTS_RECURSION: u16 = 0x0100;
const HAS_RECURSION: u16 = 0x0080;
const CODE: u16 = 0x000f;

/// The code of a response (RFC 1035, 4.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseCode {
    NoError = 0,
    FormErr = 1,
    ServFail = 2,
    NxDomain = 3,
    NotImp = 4,
    Refused = 5,
}

// Types of records.
const A: u16 = 1;
const PTR: u16 = 12;
const AAAA: u16 = 28;
/// The class of the Internet.
const IN: u16 = 1;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Query<'a> {
    id: [u8; 2],
    flags: u16,
    /// Encoded as in messages, with the root at its end.
    name: &'a [u8],
    kind: u16,
    class: u16,
    message: &'a [u8],
}

fn word(message: &[u8], at: usize) -> Option<u16> {
    let bytes = message.get(at..at.checked_add(2)?)?;
    Some(u16::from_be_bytes(bytes.try_into().ok()?))
}

/// The encoded name of the first question.
fn question_name(message: &[u8]) -> Option<&[u8]> {
    let mut end = HEADER;
    loop {
        let length = usize::from(*message.get(end)?);
        end += 1 + length;
        if length == 0 {
            return message.get(HEADER..end);
        }
        // A pointer is longer than 63. The first name has nothing that it could point to.
        if length > 63 || end - HEADER >= MAX_NAME {
            return None;
        }
    }
}

impl<'a> Query<'a> {
    /// Parses a question. If the message cannot be relayed, the error is the response to it, if it
    /// gets one.
    pub fn read(message: &'a [u8]) -> Result<Self, Option<Vec<u8>>> {
        let (Some(id), Some(flags)) = (message.get(..2), word(message, 2)) else {
            return Err(None);
        };
        // Two servers that answer answers would never stop.
        if flags & RESPONSE != 0 || message.len() < HEADER {
            return Err(None);
        }
        let refuse = |code: ResponseCode| {
            let flags = RESPONSE | flags & (OPCODE | WANTS_RECURSION) | code as u16;
            let mut answer = [id, &flags.to_be_bytes()].concat();
            answer.resize(HEADER, 0);
            Err(Some(answer))
        };
        if flags & OPCODE != 0 {
            return refuse(ResponseCode::NotImp);
        }
        let Some(name) = question_name(message).filter(|_| word(message, 4) == Some(1)) else {
            return refuse(ResponseCode::FormErr);
        };
        let end = HEADER + name.len();
        let (Some(kind), Some(class)) = (word(message, end), word(message, end + 2)) else {
            return refuse(ResponseCode::FormErr);
        };
        Ok(Self { id: [id[0], id[1]], flags, name, kind, class, message })
    }

    /// The name in lower case, with dots. Nothing if it has characters that are invalid in host
    /// names.
    pub fn text(&self) -> Option<String> {
        self.spelled().map(|name| name.to_ascii_lowercase())
    }

    /// The name with dots, in the guest's spelling.
    fn spelled(&self) -> Option<String> {
        let (mut text, mut rest) = (String::new(), self.name);
        while let Some((length, after)) = rest.split_first().filter(|(length, _)| **length > 0) {
            let (label, after) = after.split_at_checked(usize::from(*length))?;
            let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_".contains(byte);
            if !label.iter().all(plain) {
                return None;
            }
            if !text.is_empty() {
                text.push('.');
            }
            text.extend(label.iter().copied().map(char::from));
            rest = after;
        }
        Some(text).filter(|text| !text.is_empty())
    }

    /// The message after the name: type, class and other records.
    fn rest(&self) -> &'a [u8] {
        &self.message[HEADER + self.name.len()..]
    }

    fn asks_for_address(&self) -> bool {
        self.class == IN && [A, AAAA].contains(&self.kind)
    }

    /// The same question with another id, and for another name if there is one.
    pub fn forward(&self, id: [u8; 2], name: Option<&str>) -> Option<Vec<u8>> {
        let name = match name {
            Some(name) => labels(name)?,
            None => self.name.to_vec(),
        };
        Some([&id, &self.message[2..HEADER], &name, self.rest()].concat())
    }

    /// A response of our own without records.
    pub fn refuse(&self, code: ResponseCode) -> Vec<u8> {
        self.respond(RESPONSE | HAS_RECURSION | code as u16, 0)
    }

    fn respond(&self, flags: u16, records: u16) -> Vec<u8> {
        let flags = flags | self.flags & WANTS_RECURSION;
        let mut answer = self.id.to_vec();
        for word in [flags, 1, records, 0, 0] {
            answer.extend(word.to_be_bytes());
        }
        answer.extend(self.name);
        answer.extend(self.kind.to_be_bytes());
        answer.extend(self.class.to_be_bytes());
        answer
    }

    /// A truncated response, so that the guest asks again by TCP.
    fn truncate(&self) -> Vec<u8> {
        self.respond(RESPONSE | HAS_RECURSION | TRUNCATED, 0)
    }

    /// The maximum size of a datagram that the guest accepts, in bytes (RFC 6891, 6.2.3).
    fn max_datagram(&self) -> usize {
        let packet = Packet::parse(self.message).ok();
        let size = packet.and_then(|packet| packet.opt().map(|opt| opt.udp_packet_size));
        size.map_or(MAX_DATAGRAM, |size| usize::from(size).clamp(MAX_DATAGRAM, 4096))
    }

    /// The answer, truncated if it does not fit into a datagram.
    pub fn fit(&self, answer: Vec<u8>, transport: Transport) -> Vec<u8> {
        let fits = transport == Transport::Tcp || answer.len() <= self.max_datagram();
        if fits { answer } else { self.truncate() }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    Udp,
    Tcp,
}

/// Encodes a name for a message (RFC 1035, 3.1). Empty labels are invalid, also one at the end.
pub(super) fn labels(name: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(name.len() + 2);
    for label in name.split('.') {
        bytes.push(u8::try_from(label.len()).ok().filter(|length| (1..=63).contains(length))?);
        bytes.extend(label.as_bytes());
    }
    bytes.push(0);
    (bytes.len() <= MAX_NAME).then_some(bytes)
}

/// Names that only we know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalNames {
    /// Address of the pod, as the guest sees it.
    pub gateway: Ipv4Addr,
    pub guest: Ipv4Addr,
    /// Default gateway of the pod.
    pub default_gateway: Option<Ipv4Addr>,
    /// Host name of the guest.
    pub host: String,
}

impl LocalNames {
    /// The answer, if the question is about one of these names or one of `hosts`.
    pub fn answer(&self, query: &Query<'_>, hosts: &Hosts) -> Option<Vec<u8>> {
        if query.class != IN {
            return None;
        }
        let name = query.text()?;
        let known = self.addresses(&name, hosts);
        let data: Vec<Vec<u8>> = match (known.is_empty(), query.kind) {
            (false, kind) => known.iter().filter_map(|address| record(*address, kind)).collect(),
            (true, PTR) => vec![labels(&self.name_of(&name)?)?],
            (true, _) => return None,
        };
        let flags = RESPONSE | HAS_RECURSION | AUTHORITATIVE;
        let mut answer = query.respond(flags, u16::try_from(data.len()).ok()?);
        for data in data {
            // A pointer to the name of the question, which follows the header.
            answer.extend([0xc0, 12]);
            answer.extend(query.kind.to_be_bytes());
            answer.extend(IN.to_be_bytes());
            answer.extend(TTL.to_be_bytes());
            answer.extend(u16::try_from(data.len()).ok()?.to_be_bytes());
            answer.extend(data);
        }
        Some(answer)
    }

    fn addresses(&self, name: &str, hosts: &Hosts) -> Vec<IpAddr> {
        let label = name.strip_suffix(".lan").unwrap_or(name);
        match name {
            HOST_NAME => vec![self.gateway.into()],
            GATEWAY_NAME if self.default_gateway.is_some() => {
                self.default_gateway.map(IpAddr::V4).into_iter().collect()
            }
            _ if label.eq_ignore_ascii_case(&self.host) => vec![self.guest.into()],
            // Windows adds our domain to names without one.
            _ => {
                let short = hosts.addresses(label).filter(|_| label != name);
                hosts.addresses(name).chain(short).take(MAX_ADDRESSES).collect()
            }
        }
    }

    /// The name for a question of a reverse lookup (`in-addr.arpa`).
    fn name_of(&self, reverse: &str) -> Option<String> {
        let octets = reverse.strip_suffix(".in-addr.arpa")?;
        let address: Ipv4Addr = octets.rsplit('.').collect::<Vec<_>>().join(".").parse().ok()?;
        match address {
            it if it == self.gateway => Some(HOST_NAME.to_owned()),
            it if it == self.guest => Some(format!("{}.{DOMAIN}", self.host.to_ascii_lowercase())),
            _ => None,
        }
    }
}

/// The data of a record of this type. Nothing if the address is of the other family.
fn record(address: IpAddr, kind: u16) -> Option<Vec<u8>> {
    match (address, kind) {
        (IpAddr::V4(address), A) => Some(address.octets().to_vec()),
        (IpAddr::V6(address), AAAA) => Some(address.octets().to_vec()),
        _ => None,
    }
}

/// The names to ask for, one after the other, until one has an address. They follow the pod's
/// search list, as for programs in the pod. `None` is the original name.
pub fn candidates(query: &Query<'_>, resolv: &Resolv) -> Vec<Option<String>> {
    let Some(name) = query.text().filter(|_| query.asks_for_address()) else {
        return vec![None];
    };
    let is_in = |domain: &str| name.strip_suffix(domain).is_some_and(|it| it.ends_with('.'));
    if let Some(label) = name.strip_suffix(".lan").filter(|label| !label.contains('.')) {
        // Windows has added our domain to a short name, for example of another container.
        return vec![None, Some(label.to_owned())];
    }
    if name.ends_with(".arpa") || resolv.search.iter().any(|domain| is_in(domain)) {
        return vec![None];
    }
    let longer = |domain: &String| Some(format!("{name}.{domain}"));
    let searched = resolv.search.iter().map(longer);
    let dots = name.matches('.').count();
    if dots >= usize::from(resolv.dots) {
        [None].into_iter().chain(searched).collect()
    } else {
        searched.chain([None]).collect()
    }
}

/// Whether a message is the response to a question: it must repeat its id and its question.
pub fn is_answer(sent: &[u8], received: &[u8]) -> bool {
    let (Some(asked), Some(answered)) = (question_name(sent), question_name(received)) else {
        // A server that cannot parse a question sends an error without it.
        return same_id(sent, received)
            && received.len() == HEADER
            && response_code(received) != ResponseCode::NoError;
    };
    let rest = |message: &[u8], name: &[u8]| {
        let end = HEADER + name.len();
        message.get(end..end + 4).map(<[u8]>::to_vec)
    };
    same_id(sent, received)
        && word(received, 4) == Some(1)
        && asked.eq_ignore_ascii_case(answered)
        && rest(sent, asked).is_some()
        && rest(sent, asked) == rest(received, answered)
}

fn same_id(sent: &[u8], received: &[u8]) -> bool {
    let flags = word(received, 2).unwrap_or(0);
    flags & RESPONSE != 0 && received.len() >= HEADER && word(sent, 0) == word(received, 0)
}

pub fn response_code(answer: &[u8]) -> ResponseCode {
    match word(answer, 2).unwrap_or(0) & CODE {
        0 => ResponseCode::NoError,
        1 => ResponseCode::FormErr,
        3 => ResponseCode::NxDomain,
        4 => ResponseCode::NotImp,
        5 => ResponseCode::Refused,
        _ => ResponseCode::ServFail,
    }
}

/// Whether a response has records, or may have them by TCP.
pub fn is_positive(answer: &[u8]) -> bool {
    let some = word(answer, 6).is_some_and(|records| records > 0);
    response_code(answer) == ResponseCode::NoError && (some || is_truncated(answer))
}

pub fn is_truncated(answer: &[u8]) -> bool {
    word(answer, 2).is_some_and(|flags| flags & TRUNCATED != 0)
}

/// The answer with the guest's id. An answer for a name with a search domain becomes one for the
/// guest's name, with an alias (CNAME) between them.
pub fn rename(query: &Query<'_>, mut answer: Vec<u8>, name: Option<&str>) -> Option<Vec<u8>> {
    let Some(name) = name else {
        answer.get_mut(..2)?.copy_from_slice(&query.id);
        return Some(answer);
    };
    if is_truncated(&answer) {
        return Some(query.truncate());
    }
    let mut packet = Packet::parse(&answer).ok()?;
    let asked = query.spelled()?;
    let asked = Name::new(&asked).ok()?;
    let alias = RData::CNAME(CNAME(Name::new(name).ok()?));
    packet.answers.insert(0, ResourceRecord::new(asked.clone(), CLASS::IN, TTL, alias));
    packet.questions.first_mut()?.qname = asked;
    // These sections are optional.
    packet.name_servers.clear();
    packet.additional_records.clear();
    packet.set_id(u16::from_be_bytes(query.id));
    packet.build_bytes_vec_compressed().ok()
}

#[cfg(test)]
mod test {
    use simple_dns::rdata::{A as Address, NS};
    use simple_dns::{PacketFlag, QCLASS, QTYPE, Question, TYPE};

    use super::*;

    fn ask(name: &str, kind: TYPE) -> Vec<u8> {
        let mut packet = Packet::new_query(0x1234);
        packet.set_flags(PacketFlag::RECURSION_DESIRED);
        let name = Name::new(name).unwrap();
        packet.questions.push(Question::new(
            name,
            QTYPE::TYPE(kind),
            QCLASS::CLASS(CLASS::IN),
            false,
        ));
        packet.build_bytes_vec().unwrap()
    }

    fn local() -> LocalNames {
        let address = |last| Ipv4Addr::new(172, 30, 0, last);
        let default_gateway = Some(Ipv4Addr::new(192, 0, 2, 1));
        LocalNames {
            gateway: address(1),
            guest: address(2),
            default_gateway,
            host: "Windows".into(),
        }
    }

    /// The addresses of an answer, and the names that it goes through.
    fn told(answer: &[u8]) -> (Vec<String>, Vec<Ipv4Addr>) {
        let packet = Packet::parse(answer).unwrap();
        assert_eq!(packet.id(), 0x1234);
        assert!(packet.has_flags(PacketFlag::RESPONSE));
        let mut told = (vec![packet.questions[0].qname.to_string()], Vec::new());
        for record in &packet.answers {
            match &record.rdata {
                RData::A(address) => told.1.push(address.address.into()),
                RData::CNAME(name) => told.0.push(name.0.to_string()),
                RData::PTR(name) => told.0.push(name.0.to_string()),
                _ => {}
            }
        }
        told
    }

    #[test]
    fn resolves_the_pod_and_the_guest() {
        let hosts = Hosts::read("192.0.2.7 files db.example\n192.0.2.8 files\n2001:db8::7 six\n");
        let answer = |name, kind| local().answer(&Query::read(&ask(name, kind)).unwrap(), &hosts);
        let addresses = |name| told(&answer(name, TYPE::A).unwrap()).1;
        assert_eq!(addresses("Host.LAN"), [Ipv4Addr::new(172, 30, 0, 1)]);
        assert_eq!(addresses("windows"), [Ipv4Addr::new(172, 30, 0, 2)]);
        assert_eq!(addresses("WINDOWS.lan"), [Ipv4Addr::new(172, 30, 0, 2)]);
        assert!(told(&answer("host.lan", TYPE::AAAA).unwrap()).1.is_empty());
        assert_eq!(addresses("system.lan"), [Ipv4Addr::new(192, 0, 2, 1)]);
        // Names of the hosts file, also with the domain that Windows adds.
        let files = [7, 8].map(|last| Ipv4Addr::new(192, 0, 2, last));
        assert_eq!((addresses("files"), addresses("Files.lan")), (files.to_vec(), files.to_vec()));
        assert_eq!(addresses("db.example"), files[..1]);
        let six = answer("six", TYPE::AAAA).unwrap();
        let packet = Packet::parse(&six).unwrap();
        assert!(
            matches!(&packet.answers[..], [it] if matches!(it.rdata, RData::AAAA(_))),
            "{packet:?}"
        );
        assert!(addresses("six").is_empty());
        let name = |name| told(&answer(name, TYPE::PTR).unwrap()).0[1].clone();
        assert_eq!(name("1.0.30.172.in-addr.arpa"), "host.lan");
        assert_eq!(name("2.0.30.172.in-addr.arpa"), "windows.lan");
        assert_eq!(answer("3.0.30.172.in-addr.arpa", TYPE::PTR), None);
        assert_eq!(answer("host.lan.example", TYPE::A), None);
    }

    #[test]
    fn applies_search_domains_like_the_pod() {
        let pod = Resolv::read("search ns.svc.cluster.local svc.cluster.local\noptions ndots:5\n");
        let asked = |name, kind, resolv: &Resolv| {
            let message = ask(name, kind);
            let names = candidates(&Query::read(&message).unwrap(), resolv);
            names.into_iter().map(|it| it.unwrap_or_default()).collect::<Vec<_>>()
        };
        let longer = ["web.other.ns.svc.cluster.local", "web.other.svc.cluster.local", ""];
        assert_eq!(asked("web.other", TYPE::A, &pod), longer);
        assert_eq!(asked("web.other", TYPE::TXT, &pod), [""]);
        assert_eq!(asked("web.ns.svc.cluster.local", TYPE::A, &pod), [""]);
        assert_eq!(asked("a.b.c.d.e.f", TYPE::A, &pod)[0], "");
        let plain = Resolv::read("search corp.example\n");
        assert_eq!(asked("db.eu", TYPE::AAAA, &plain), ["", "db.eu.corp.example"]);
        assert_eq!(asked("db", TYPE::A, &plain), ["db.corp.example", ""]);
        assert_eq!(asked("web.lan", TYPE::A, &Resolv::default()), ["", "web"]);
        assert_eq!(asked("1.0.0.127.in-addr.arpa", TYPE::A, &pod), [""]);
    }

    #[test]
    fn an_answer_for_a_search_name_is_rewritten_to_the_question() {
        let message = ask("Web.Other", TYPE::A);
        let query = Query::read(&message).unwrap();
        let sent = query.forward([9, 9], Some("web.other.svc.cluster.local")).unwrap();
        let mut packet = Packet::parse(&sent).unwrap().into_reply();
        let name = Name::new("web.other.svc.cluster.local").unwrap();
        let data = RData::A(Address { address: 0x0a00_0001 });
        packet.answers.push(ResourceRecord::new(name.clone(), CLASS::IN, 5, data));
        let data = RData::NS(NS(Name::new("ns.dns.cluster.local").unwrap()));
        packet.name_servers.push(ResourceRecord::new(name, CLASS::IN, 5, data));
        let received = packet.build_bytes_vec_compressed().unwrap();
        assert!(is_answer(&sent, &received) && is_positive(&received));
        let answer = rename(&query, received, Some("web.other.svc.cluster.local")).unwrap();
        let names = ["Web.Other".to_owned(), "web.other.svc.cluster.local".to_owned()];
        assert_eq!(told(&answer), (names.to_vec(), vec![Ipv4Addr::new(10, 0, 0, 1)]));
    }

    #[test]
    fn ignores_answers_to_other_questions() {
        let sent = ask("example.org", TYPE::A);
        let received = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut answer = sent.clone();
            answer[2] |= 0x80;
            change(&mut answer);
            is_answer(&sent, &answer)
        };
        assert!(received(&|_| ()));
        assert!(received(&|it| it[13] = b'E'), "the case may differ");
        assert!(!received(&|it| it[0] ^= 1), "another id");
        assert!(!received(&|it| it[2] &= 0x7f), "a question");
        assert!(!received(&|it| it[13] = b'x'), "another name");
        assert!(!received(&|it| *it.last_mut().unwrap() = 3), "another class");
        assert!(!received(&|it| it.truncate(20)));
        assert!(!received(&|it| it.truncate(12)), "no question, and no error");
    }

    #[test]
    fn invalid_queries_are_refused_or_ignored() {
        let code_of = |message: &[u8]| match Query::read(message) {
            Ok(_) => None,
            Err(answer) => Some(answer.map(|answer| response_code(&answer))),
        };
        let good = ask("example.org", TYPE::A);
        assert_eq!(code_of(&good), None);
        let with = |at: usize, byte: u8| {
            let mut bad = good.clone();
            bad[at] = byte;
            code_of(&bad)
        };
        assert_eq!(with(2, 0x80), Some(None), "an answer");
        assert_eq!(with(2, 0x28), Some(Some(ResponseCode::NotImp)), "an update");
        assert_eq!(with(5, 2), Some(Some(ResponseCode::FormErr)), "two questions");
        assert_eq!(with(12, 0xc0), Some(Some(ResponseCode::FormErr)), "a pointer");
        assert_eq!(code_of(&good[..good.len() - 1]), Some(Some(ResponseCode::FormErr)));
        assert_eq!(code_of(&good[..11]), Some(None));
    }

    #[test]
    fn an_oversized_datagram_is_truncated_and_retried_by_tcp() {
        let message = ask("example.org", TYPE::TXT);
        let query = Query::read(&message).unwrap();
        let mut long = message.clone();
        long[2] |= 0x80;
        long.resize(513, 0);
        assert_eq!(query.fit(long.clone(), Transport::Tcp), long);
        let cut = query.fit(long, Transport::Udp);
        assert!(is_truncated(&cut) && cut.len() < 100);
        let mut packet = Packet::parse(&message).unwrap();
        *packet.opt_mut() = Some(simple_dns::rdata::OPT {
            opt_codes: Vec::new(),
            udp_packet_size: 1232,
            version: 0,
        });
        let message = packet.build_bytes_vec().unwrap();
        assert_eq!(Query::read(&message).unwrap().max_datagram(), 1232);
    }
}
