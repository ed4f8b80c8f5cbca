"""Secrets of known forms do not leave the node, and what is no secret stays readable."""

import pytest

from kubelet.handlers.redaction import LONGEST, REPLACEMENT, redacted

SECRETS = {
    "password=": ("user pi password={} accepted", "hunter2-and-more"),
    "passwd:": ("passwd: {}", "hunter2"),
    "PASSWORD=": ("env PASSWORD={} started", "hunter2"),
    "DB_PASSWORD": ("DB_PASSWORD={}", "pq9!x"),
    "json": ('{{"password": "{}", "user": "pi"}}', "correct-horse"),
    "passphrase": ("passphrase = '{}'", "battery-staple"),
    "quotes": ('password="{}" user=pi', "it's one; of, many & words"),
    "single quotes": ("secret: '{}', user: pi", 'say "so" twice'),
    "escaped quotes": ('{{"password": "{}", "user": "pi"}}', 'one\\" two'),
    "doubled quotes": ("password: '{}'", "one''s two"),
    "json in json": ('{{"log":"{{\\"password\\": \\"{}\\"}}\\n"}}', "one two"),
    "rust": ('password: Some(Secret("{}")), port: 1', "one two"),
    "python": ("password=b'{}' port=1", "one two"),
    "object": ('"credentials":{},"port":1', '{"user":"pi","key":"one two"}'),
    "json of lists": ('{{"X-Api-Key":["{}"]}}', "k-0123 456"),
    "cut quotes": ("password='{}", "one two"),
    "punctuation": ("DB_PASSWORD={} started", "a,b&c;d'e"),
    "query": ("GET /?token={}&page=2, done", "ab"),
    "go": ("{{password:{},user:pi}}", "ab"),
    "command in json": ('{{"cmd":"run password={}","user":"pi"}}', "ab"),
    "psk": ('psk="{}"', "wifi-key-1234"),
    "pwd": ("mysql --user=a pwd={};", "s3cret"),
    "secret": ("client_secret={}", "aaaabbbbcccc"),
    "token=": ("token={}&x=1", "0123456789abcdef"),
    "access token": ("access_token: {}", "0123456789abcdef"),
    "api key": ("X-API-Key: {}", "k-0123456789"),
    "apikey": ("apikey={}", "0123456789"),
    "private key name": ("private_key={}", "MHcCAQEEIA"),
    "credential": ("credentials={}", "u:p"),
    "option": ("restic --password {} backup", "hunter2"),
    "option token": ("run --token {}", "abc123"),
    "option of a name": ("run --db-password {} --verbose", "hunter2"),
    "option with quotes": ("gpg --passphrase '{}' x", "one two"),
    "option of one dash": ("vault -client_secret {}", "abc123"),
    "option without a value": ("run --ask-password --token {}", "abc123"),
    "option in json": ('["--auth-token", "{}", "x"]', "one two"),
    "sshpass": ("sshpass -p {} ssh pi@nas", "hunter2"),
    "mysqldump": ("mysqldump -u root -p{} shop", "hunter2"),
    "netrc": ("machine x login y password {}", "hunter2"),
    "url of a token": ("https://{}@o1.ingest.sentry.io/1", "0123456789abcdef0123456789abcdef"),
    "url": ("cloning https://pi:{}@git.example/x.git", "p4ss"),
    "url with more than one @": ("amqp://u:{}@host/x", "p4ss@w0rd"),
    "url of a broker": ("mqtt://node:{}@10.0.0.1:1883", "p4ss-w0rd"),
    "basic": ("Authorization: Basic {}", "cGk6cmFzcGJlcnJ5"),
    "basic in json": ('{{"Authorization": "Basic {}"}}', "cGk6cmFzcGJlcnJ5"),
    "basic in json of lists": ('{{"Authorization":["Basic {}"]}}', "cGk6cmFzcGJlcnJ5"),
    "bearer": ("authorization: bearer {}", "abcdefghijklmnop"),
    "bearer in text": ("sent Bearer {} to hub", "abcdefghijklmnop"),
    "curl": ("curl -H 'Authorization: Token {}' x", "abcd1234"),
    "aws": ("key {} used", "AKIAIOSFODNN7EXAMPLE"),
    "aws session": ("key {} used", "ASIAIOSFODNN7EXAMPLE"),
    "github": ("cloned with {}", "ghp_" + "a1B2" * 9),
    "github app": ("cloned with {}", "ghs_" + "a1B2" * 9),
    "github fine-grained": ("cloned with {}", "github_pat_" + "a1B2" * 8),
    "gitlab": ("runner {}", "glpat-" + "x" * 20),
    "google": ("maps {}", "AIza" + "x" * 35),
    "google oauth": ("oauth {}", "ya29." + "x" * 30),
    "slack": ("hook {}", "xoxb-" + "1" * 12 + "-abc"),
    "stripe": ("charge {}", "sk_live_" + "x" * 24),
    "openai": ("model {}", "sk-" + "x" * 48),
    "anthropic": ("model {}", "sk-ant-api03-" + "x" * 40),
    "npm": ("publish {}", "npm_" + "x" * 36),
    "pypi": ("upload {}", "pypi-" + "x" * 60),
    "jwt": ("cookie {}", "eyJhbGciOiJFZERTQSJ9.eyJzdWIiOiJwaSJ9.c2lnbmF0dXJl"),
    "age": ("key {}", "AGE-SECRET-KEY-1" + "Q" * 50),
    "pem": ("{}", "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIA\n-----END PRIVATE KEY-----"),
    "line of a key": ("{}", "b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAABAAAAMw"),
    "pem of PGP": (
        "{}",
        "-----BEGIN PGP PRIVATE KEY BLOCK-----\nlQdGBGVx\n-----END PGP PRIVATE KEY BLOCK-----",
    ),
    "storage account": ("AccountName=x;AccountKey={};Endpoint=here", "c3RvcmFnZQ=="),
    "wireguard": ("PrivateKey = {}", "yAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk="),
    "preshared": ("PresharedKey = {}", "yAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk="),
    "aws secret": ("aws_secret_access_key = {}", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"),
    "url without a user": ("redis://:{}@localhost:6379/0", "r3dis"),
    "cookie": ("Cookie: {}", "session=4d5e6f; theme=dark"),
    "set cookie": ("Set-Cookie: {}", "sid=4d5e6f"),
    "shadow": ("root:{}:19000:0", "$6$saltsalt$Qk3lC1xJ0kq9b8Wm7e6"),
    "shadow of today": ("pi:{}:19000:0", "$y$j9T$F5Jx5fExrKuPp53xLKQ..1$X3DX6M94c7o"),
    "bcrypt": ("admin:{}", "$2y$10$abcdefghijklmnopqrstuv"),
    "slack hook": ("https://hooks.slack.com/services/{}", "T000/B000/XXXXXXXX"),
    "telegram": ("https://api.telegram.org/bot{}/getMe", "123456789:" + "A" * 35),
    "gitlab runner": ("register {}", "glrt-" + "x" * 20),
    "stripe hook": ("hook {}", "whsec_" + "x" * 32),
    "hugging face": ("model {}", "hf_" + "x" * 34),
    "digital ocean": ("doctl {}", "dop_v1_" + "a1" * 32),
    "sendgrid": ("mail {}", "SG." + "x" * 22 + "." + "y" * 43),
    "vault": ("vault {}", "hvs." + "x" * 24),
    "docker": ("login {}", "dckr_pat_" + "x" * 27),
    "tailscale": ("up {}", "tskey-auth-" + "x" * 20),
    "shopify": ("shop {}", "shpat_" + "a1" * 16),
    "databricks": ("jobs {}", "dapi" + "a1" * 16),
    "linear": ("issue {}", "lin_api_" + "x" * 32),
    "square": ("pay {}", "sq0atp-" + "x" * 22),
    "pem of OpenSSH": ("{}", "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk"),
}


@pytest.mark.parametrize("form", SECRETS)
def test_a_secret_of_a_known_form_is_replaced_and_nothing_of_it_stays(form: str) -> None:
    around, secret = SECRETS[form]
    shown = around.format(REPLACEMENT)
    assert redacted(around.format(secret)) == redacted(shown) == shown


@pytest.mark.parametrize("form", [form for form in SECRETS if form != "line of a key"])
def test_a_text_that_is_cut_shows_no_part_of_a_secret_that_the_whole_does_not(form: str) -> None:
    around, secret = SECRETS[form]
    text = around.format(secret)
    whole = f"{text} {'and so on ' * 200}"
    for limit in range(1, len(text) + 1):
        assert redacted(whole).startswith(redacted(whole, limit).removesuffix("[cut]"))


def test_what_is_cut_is_marked_and_a_secret_across_the_cut_is_left_out() -> None:
    assert redacted("one two three", 7) == "one two[cut]"
    assert redacted("one two", 7) == "one two"
    before = "a " * (LONGEST // 2 - 50)
    assert redacted(f"{before}https://pi:{'p4ss' * 64}@git.example") == f"{before}https://pi:[cut]"


@pytest.mark.parametrize(
    "text",
    [
        "Failed password for pi from 10.0.0.7 port 4711 ssh2",
        "Accepted publickey for pi from 10.0.0.7",
        "https://deb.debian.org/debian bookworm InRelease",
        "e2fsck: /dev/mmcblk0p2: clean, 41/62 files",
        "skipping task-runner, asking later",
        "tokens per second: 12",
        "docker0: port 1(veth0) entered blocking state",
        "cookie jar is full",
        "costs $5 and $6 each",
        'password="" user=pi',
        "apt-get --option value --secretless mode",
        "login of pi on tty1, mysql is up - p99 12 ms",
        "https://example.org/x?page=2@3",
        "hit the by-pass road, token-based",
    ],
)
def test_what_is_no_secret_stays_as_it_is(text: str) -> None:
    assert redacted(text) == text
